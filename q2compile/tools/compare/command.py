# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile compare`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config
from q2compile.tools.compare.measure import compare
from q2compile.tools.compare.measurements import Comparison, ModuleError, check_budget
from q2compile.tools.given import built


def run(arguments: Namespace) -> int:
    """Measures, prints the table, writes it, the picture and the options. Returns the status."""
    # Mistakes are reported before the minutes that measuring takes.
    check_budget(arguments.budget)
    config = Config.from_options({} if arguments.recipe is None else {"recipe": arguments.recipe})
    model, batches, loss = built(arguments.build)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device.type
    autocast = (
        torch.autocast(device, getattr(torch, arguments.autocast))
        if arguments.autocast
        else nullcontext()
    )
    with autocast:
        comparison = compare(
            model,
            batches,
            config.recipe,
            loss=loss,
            options={"policy": config.policy, "global_scale": config.global_scale},
        )
    print(comparison, end="\n\n")
    limits = (arguments.budget, arguments.of, arguments.device)
    chosen = comparison.chosen(*limits)
    options = json.dumps(comparison.options(*limits), indent=2)
    if chosen:
        print(
            f"{len(chosen)} of {len(comparison.modules)} modules leave {comparison.recipe}, for "
            f"{arguments.budget:.0%} of the {arguments.of}; they account for "
            f"{_share(comparison, chosen):.0%} of the gradient's squared error:"
        )
    else:
        print(f"no module fits into {arguments.budget:.0%} of the {arguments.of}:")
    print(options)
    missed = comparison.too_large(*limits)
    if missed is not None:
        worst, needs = missed
        one = len(worst) == 1
        who = worst[0].module + ("" if one else f" and {len(worst) - 1} like it")
        print(
            f"{who} {'accounts' if one else 'account'} for {_share(comparison, worst):.0%} of the "
            f"gradient's squared error and {'costs' if one else 'cost'} more: --budget {needs:g} "
            f"puts {'it' if one else 'them'} into bf16"
        )
    data = {
        **comparison.to_json(),
        "limits": dict(zip(("budget", "of", "device"), limits, strict=True)),
    }
    print("wrote " + ", ".join(map(str, _written(arguments.out, comparison, data, options))))
    return 0


def _share(comparison: Comparison, modules: Sequence[ModuleError]) -> float:
    return sum(comparison.share(m) or 0.0 for m in modules)


def _written(
    folder: Path, comparison: Comparison, data: Mapping[str, Any], options: str
) -> list[Path]:
    """The files of a comparison; without the picture where matplotlib is not installed."""
    written = [folder / name for name in ("compare.json", "options.json", "compare.png")]
    written[0].write_text(json.dumps(data, indent=1), encoding="utf-8")
    written[1].write_text(options, encoding="utf-8")
    try:
        comparison.draw(written[2])
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return written[:2]
    return written
