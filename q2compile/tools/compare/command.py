# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile compare`."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from q2compile.config import Config
from q2compile.errors import ConfigError, shown
from q2compile.tools.arguments import BUILT
from q2compile.tools.compare.comparison import Comparison
from q2compile.tools.compare.measure import compare
from q2compile.tools.compare.measurements import ModuleError, check_budget


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
            f"{who} {'makes' if one else 'make'} {_share(comparison, worst):.0%} of the gradient's "
            f"squared error and {'costs' if one else 'cost'} more: --budget {needs:g} takes "
            f"{'it' if one else 'them'}"
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
        found = vars(_module_of(Path(home)))
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


def _module_of(file: Path) -> ModuleType:
    """A program's file as a module with a name that can be imported: Dynamo does, for a model whose
    forward uses a global name."""
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_{id(file):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
