# SPDX-License-Identifier: Apache-2.0
"""Code that is not compiled and may read a gathered weight while its module runs.

It reads at any time, on any rank, and without a collective: plain FSDP2 has the values there. So
before the gathers of each forward the ranks exchange which weights such code may read, and gather
the values of these besides their codes, in this forward and its backward. The code is

    a hook of the user's on a module that runs while FSDP2 has the weight gathered
    the forward of such a module, if it is not compiled and it, or a function that it names, names
        a parameter of a module inside it

Code that is reached in another way, such as a forward that is replaced later, or a name that is
made at run time, gets an error instead (`sharded_weight`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from q2compile.capture.module_tree import named_modules, own_parameters
from q2compile.torch_internals.dynamo import own_compile_call
from q2compile.torch_internals.module_hooks import hooks_of_users, name_of

_ALL = {"parameters", "named_parameters", "get_parameter", "state_dict", "_parameters"}


class EagerReaders:
    """The readers in a model under fully_shard. Its modules are those that it has now."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {m: name for name, m in named_modules(root)}
        self._inside = {m: {inner for _, inner in named_modules(m)} for m in self._names}
        self._naming = [m for m in self._names if _names_a_weight(m)]
        self._warned = False

    def find(self) -> Collection[nn.Module]:
        """The modules with a hook, or a forward, that may read weights now; all, if one with a hook
        is compiled, because Dynamo may run the code that it has compiled with it for others."""
        for_all = list(hooks_of_users(None))
        hooks = {m: hook for m in self._names for hook in (*for_all, *hooks_of_users(m))}
        if not hooks and not self._naming:
            return ()
        compiled = [m for m in self._names if own_compile_call(m) is not None]
        inside = set[nn.Module]().union(*(self._inside[m] for m in compiled))
        found = {m: "the forward" for m in self._naming if m not in inside}
        found |= {m: f"the hook {name_of(hook)!r}" for m, hook in hooks.items()}
        if found and not self._warned:
            self._warned = True
            self._warn(*next(iter(found.items())))
        return found.keys() if inside.isdisjoint(hooks) else self._names.keys()

    def _warn(self, module: nn.Module, what: str) -> None:
        where = self._names[module] or type(module).__name__
        warnings.warn(
            f"q2compile: gather_codes: {what} of {where!r} may read weights, so as long as it is "
            "there FSDP2 gathers their values besides their codes",
            RuntimeWarning,
            stacklevel=2,
        )

    def may_read(self, found: Collection[nn.Module], home: nn.Module, is_kept: bool) -> bool:
        """True if a module of ``find()`` runs while the weights of ``home`` are gathered.
        is_kept: FSDP2 leaves them gathered after its forward."""
        return bool(found) and (is_kept or not self._inside[home].isdisjoint(found))


def _names_a_weight(module: nn.Module) -> bool:
    """True if the forward of a module, or a function that it names, names a parameter of a module
    inside it, by an attribute or a variable."""
    inside = [m for _, m in named_modules(module) if m is not module]
    leaves = {leaf for m in inside for leaf, p in own_parameters(m).items() if p.ndim > 1}
    if not leaves:
        return False
    todo, seen = [getattr(module, "forward", None)], set[CodeType]()
    while todo:
        function = inspect.unwrap(_function_of(todo.pop()))
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        if function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function.__code__)
        names = set(_names_in(function.__code__))
        found = [each for name in names for each in _values_of(name, function, module)]
        values = [each for value in found for each in _parts_of(value, names)]
        if not (leaves | _ALL).isdisjoint(names):
            return True
        if any(isinstance(each, nn.Parameter) for each in values):
            return True
        todo += values
    return False


def _values_of(name: str, function: FunctionType, module: nn.Module) -> Iterator[Any]:
    """The values that a name in a function called by a forward may have: an attribute of the
    module, or a variable of the function."""
    yield getattr(type(module), name, None)
    yield vars(module).get(name)
    yield function.__globals__.get(name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    with suppress(KeyError, ValueError):  # a cell without a value yet
        yield cells[name].cell_contents


def _function_of(value: Any) -> Any:
    """The function that a call of a value runs, if it is Python code."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    if isinstance(value, FunctionType | type | nn.Module):
        return value
    return inspect.getattr_static(value, "__call__", None)


def _parts_of(value: Any, names: Collection[str]) -> Iterator[Any]:
    """A value, the elements of a container, and what is named beside it: functions of a Python
    module, methods of an object."""
    yield value
    if isinstance(value, list | tuple | set | dict):
        yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, ModuleType) or type(value).__module__ not in ("builtins", "torch"):
        yield from (inspect.getattr_static(value, each, None) for each in names)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
