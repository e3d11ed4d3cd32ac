# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands: a model by FILE.py:FUNCTION, and the options of training by a file; and
batches, each of which is what a model is called with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from q2compile.config import Config, read_options_file
from q2compile.errors import ConfigError, naming, shown
from q2compile.tools.arguments import BUILT

# These options in a dump's run.json decide how each matmul is quantized.
_OF_RUN = ("recipe", "policy", "global_scale", "strict")


def given_options(arguments: Namespace) -> dict[str, Any]:
    """The options that --options and --recipe give, checked, as are those of Q2COMPILE_CONFIG; {}
    if neither is there."""
    given: dict[str, Any] = {}
    if arguments.options is not None:
        given = _of_file(arguments.options)
        with naming(f"--options {arguments.options}"):
            Config.from_options(given)
    if arguments.recipe is not None:
        given["recipe"] = arguments.recipe
    Config.from_options(given)
    return given


def _of_file(path: Path) -> dict[str, Any]:
    """The options in a file, or in the run.json of a dump, or of a dump's folder; of several ranks
    in rank 0's."""
    if path.is_dir():
        of_ranks = path / "rank0" / "run.json"
        path = of_ranks if of_ranks.is_file() else path / "run.json"
    loaded = dict(read_options_file(str(path), f"--options {path}"))
    if not isinstance(loaded.get("options"), list):
        return loaded
    defaults = {field.name: field.default for field in fields(Config)}
    runs = [{key: of.get(key, defaults[key]) for key in _OF_RUN} for of in loaded["options"]]
    differing = [run for i, run in enumerate(runs) if run not in runs[:i]]
    if len(differing) != 1:
        raise ConfigError(
            f"--options {path}: graphs of this run were compiled with {len(differing)} different "
            "options, such as those before and after a late switch; write the ones to use into a "
            "file of their own"
        )
    return differing[0]


def refuse_no_page(path: Path) -> None:
    """Raise ConfigError, before anything runs, if no page can be written to ``path``."""
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise ConfigError(f"--output: {path}: {why}; allowed: the page's name in a folder")


def built(where: str) -> tuple[torch.nn.Module, Any, Any]:
    """The result of the user's function: a model, an iterator over its batches, which has at least
    one, and a loss or None."""
    function = _function(where)
    result = function()
    if not (
        isinstance(result, tuple)
        and len(result) in (2, 3)
        and isinstance(result[0], torch.nn.Module)
        and any(True for _ in result[0].parameters())
    ):
        raise ConfigError(f"{where} returned {shown(result)}; allowed: {BUILT}")
    model, batches, *loss = result
    return model, all_batches(batches, where), loss[0] if loss else None


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


def all_batches(batches: Any, what: str) -> Iterator[Any]:
    """An iterator over ``batches``, which may be a list, a DataLoader, a generator or an iterator.

    Raises ConfigError, which begins with ``what``, if there is no batch, and for a single batch in
    the place of a collection: a loop over a tensor would take each row for a batch.
    """
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise ConfigError(
            f"{what}: got a {type(batches).__name__} in place of batches; allowed: a list, a "
            "DataLoader or another iterable of batches. Put a single batch into a list"
        )
    rest = iter(batches)
    for first in rest:
        return chain([first], rest)
    raise ConfigError(f"{what}: there is no batch")


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call of the model, from a batch: a mapping of
    keyword arguments, a tuple or list of positional ones, or a single argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
