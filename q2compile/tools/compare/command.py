# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile compare`."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config
from q2compile.cost_model.devices import DEVICES
from q2compile.errors import ConfigError, shown
from q2compile.tools.compare.comparison import Comparison
from q2compile.tools.compare.measure import compare
from q2compile.tools.compare.measurements import check_budget

_RETURNS = "(model, batches) or (model, batches, loss)"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes it, the picture and the options. Returns the status."""
    parser = argparse.ArgumentParser(
        prog="q2compile compare",
        description="Where a recipe's error comes from: runs a model in bf16 and in the recipe, "
        "ranks its modules, and writes the policy that keeps the worst in bf16.",
    )
    parser.add_argument(
        "build",
        metavar="FILE.py:FUNCTION",
        help=f"or package.module:FUNCTION; called without arguments it returns {_RETURNS}: a model "
        "on its device, a few batches, and a function from the model's output to the loss",
    )
    parser.add_argument("--recipe", help="default: that of Q2COMPILE_CONFIG, or quartet2")
    parser.add_argument(
        "--budget", type=float, default=0.1, help="share that may go back to bf16; default 0.1"
    )
    parser.add_argument(
        "--of", choices=("flops", "time"), default="flops", help="of what; default %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=[d.column for d in DEVICES],
        default=DEVICES[0].column,
        help="whose predicted time, with --of time; default %(default)s",
    )
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="run under autocast to this dtype"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        help="the folder to write into; default %(default)s",
    )
    arguments = parser.parse_args(argv)
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
        raise ConfigError(f"{where} returned {shown(built)}; allowed: {_RETURNS}")
    model, batches, *loss = built
    return model, batches, loss[0] if loss else None


def _function(where: str) -> Callable[[], Any]:
    home, colon, name = where.rpartition(":")
    if not colon or not home or not name:
        raise ConfigError(
            f"got {where!r}; allowed: FILE.py:FUNCTION or package.module:FUNCTION, a function that "
            f"returns {_RETURNS}"
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
