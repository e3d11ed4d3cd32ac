# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile compare`."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config
from q2compile.errors import ConfigError, shown
from q2compile.tools.arguments import BUILT
from q2compile.tools.compare.comparison import Comparison
from q2compile.tools.compare.measure import compare
from q2compile.tools.compare.measurements import check_budget


def run(arguments: Namespace) -> int:
    """Measures, prints the table, writes it, the picture and the options. Returns the status."""
    check_budget(arguments.budget)  # before the minutes that measuring takes
    model, batches, loss = built(arguments.build)
    arguments.out.mkdir(parents=True, exist_ok=True)  # fails early if it can't be written

    config = Config.from_options({} if arguments.recipe is None else {"recipe": arguments.recipe})
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
            f"{len(chosen)} of {len(comparison.modules)} modules back to bf16, for "
            f"{arguments.budget:.0%} of the {arguments.of}; they make "
            f"{sum(comparison.share(m) or 0.0 for m in chosen):.0%} of the gradient's squared "
            "error:"
        )
    else:
        print(f"no module fits into {arguments.budget:.0%} of the {arguments.of}:")
    print(options)
    missed = comparison.too_large(*limits)
    if missed is not None:
        worst, needs = missed
        makes = f"{comparison.share(worst) or 0.0:.0%} of the gradient's squared error"
        print(f"{worst.module} makes {makes} and costs more: --budget {needs:g} takes it")
    print("wrote " + ", ".join(map(str, _written(arguments.out, comparison, options))))
    return 0


def _written(folder: Path, comparison: Comparison, options: str) -> list[Path]:
    """The files of a comparison; without the picture where matplotlib is not installed."""
    written = [folder / name for name in ("compare.json", "options.json", "compare.png")]
    written[0].write_text(json.dumps(comparison.to_json(), indent=1), encoding="utf-8")
    written[1].write_text(options, encoding="utf-8")
    try:
        comparison.draw(written[2])
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return written[:2]
    return written


def built(where: str) -> tuple[torch.nn.Module, Any, Any]:
    """The result of the user's function: a model, batches, and a loss or None."""
    function = _function(where)
    built = function()
    if not (
        isinstance(built, tuple)
        and len(built) in (2, 3)
        and isinstance(built[0], torch.nn.Module)
        and any(True for _ in built[0].parameters())
    ):
        raise ConfigError(f"{where} returned {shown(built)}; allowed: {BUILT}")
    model, batches, *loss = built
    return model, batches, loss[0] if loss else None


def _function(where: str) -> Callable[[], Any]:
    home, colon, name = where.rpartition(":")
    if not colon or not home or not name:
        raise ConfigError(
            f"got {where!r}; allowed: FILE.py:FUNCTION or package.module:FUNCTION, a function that "
            f"returns {BUILT}"
        )
    if home.endswith(".py"):
        sys.path.insert(0, str(Path(home).resolve().parent))  # as `python FILE.py` has it
        found = runpy.run_path(home)
    else:
        sys.path.insert(0, "")
        try:
            found = vars(importlib.import_module(home))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{where}: {error}") from None
    function = found.get(name)
    if not callable(function):
        own = found["__name__"]
        names = [n for n, f in found.items() if callable(f) and f.__module__ == own]
        raise ConfigError(f"{home} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return function
