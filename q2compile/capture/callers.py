# SPDX-License-Identifier: Apache-2.0
"""The names that a function given to torch.compile has for its models: ``student``, ``teacher``.

A model that is compiled itself needs no such name. A function that runs two does, if both have an
``up``, whether Dynamo makes one graph of the function or breaks it in the middle of a model.

A variable is a model, or holds models: a dict, a list or a tuple under keys that the function's
code has as constants, any other object in attributes that the code names. Nothing is searched, so
the time does not depend on what the variables hold, and no code of theirs runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

from torch import nn

from q2compile.capture.frames import Running, look
from q2compile.capture.module_tree import is_module, named_modules, named_parameters, unwrapped
from q2compile.torch_internals.dynamo import compiled_frame, is_wrapper_of_callable, original_code

# Where a model was found: a variable, and what leads from there to it.
Path = tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A function and its variables by name, with those of its closure; ``namespace``: its
    globals."""

    code: CodeType
    variables: Mapping[str, Any]
    namespace: Mapping[str, Any]


def compiled_callable() -> Function | nn.Module | None:
    """The function that Dynamo compiles now, or the model in a functools.partial given to
    torch.compile. None if Dynamo is not compiling."""
    found = compiled_frame()
    if found is None:
        return None
    code, variables, namespace = found
    if is_wrapper_of_callable(code):
        return _called(variables.get("fn"), (), {})
    return Function(code, variables, namespace)


def _called(value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The function or the module that a call of ``value`` with these arguments runs."""
    while type(value) is functools.partial:
        args, kwargs = (*value.args, *args), {**value.keywords, **kwargs}
        value = value.func
    if is_module(value):
        return unwrapped(value)
    if type(value) is MethodType:
        return _called(value.__func__, (value.__self__, *args), kwargs)
    if type(value) is not FunctionType:
        return _called_object(value)
    code, cells = value.__code__, value.__closure__ or ()
    given = dict(zip(code.co_varnames[: code.co_argcount], args, strict=False))
    closure = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True) if _full(c)}
    return Function(code, {**closure, **given, **kwargs}, value.__globals__)


def _called_object(value: Any) -> Function | None:
    """The method ``__call__`` of an object, whose attributes are its variables."""
    method = next((vars(c)["__call__"] for c in type(value).__mro__ if "__call__" in vars(c)), None)
    if type(method) is not FunctionType:
        return None
    attributes = _attributes(value)
    named = {name: attributes[name] for name in _names(method.__code__) if name in attributes}
    return Function(method.__code__, named, method.__globals__)


def _full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def models_that_run(frames: Sequence[Running]) -> list[nn.Module]:
    """All models that are known while Dynamo compiles: running ones, and the function's."""
    given = compiled_callable()
    own = [given] if isinstance(given, nn.Module) else []
    return [
        *own,
        *(f.module for f in frames if f.module is not None),
        *models_of(frames, None).values(),
    ]


def models_of(frames: Sequence[Running], root: nn.Module | None) -> dict[str, nn.Module]:
    """The models that the function around ``root`` knows, by what it calls them; {} if there is no
    function in what torch.compile was given.

    root    the model that the compiled frame belongs to; None if it is the function's own frame

    A single model that is a variable has the name "", as it had when it was compiled alone.
    """
    region = next((i for i, f in enumerate(frames) if f.is_region), len(frames))
    of_root = [i for i, f in enumerate(frames[:region]) if root is not None and f.module is root]
    if root is not None and not of_root:
        return {}
    inside = frames[of_root[-1] + 1 if of_root else 0 : region]
    users = [f.frame for f in inside if f.frame is not None]
    if users:
        code, namespace = original_code(users[-1].f_code), users[-1].f_globals
        return look(users[-1], lambda v: _named(_models(Function(code, v, namespace))))
    function = compiled_callable() if root is None else None
    return _named(_models(function)) if isinstance(function, Function) else {}


def _models(function: Function) -> dict[Path, nn.Module]:
    """The models that a function names: what has a weight of a matmul, and is no part of another
    one."""
    found: dict[Path, nn.Module] = {}
    for path, value in _values(function):
        model = unwrapped(value)
        weighs = any(parameter.ndim >= 2 for _, parameter in named_parameters(model))
        if weighs and not any(model is other for other in found.values()):
            found[path] = model
    parts = {id(part) for m in found.values() for name, part in named_modules(m) if name}
    return {path: model for path, model in found.items() if id(model) not in parts}


def _values(function: Function) -> Iterator[tuple[Path, nn.Module]]:
    """The modules that the code leads to: from its arguments first, then from its other variables
    and those of its closure, then from the globals that it names."""
    code, names, constants = function.code, _names(function.code), _constants(function.code)
    own = [*code.co_varnames, *code.co_cellvars, *code.co_freevars, *function.variables]
    variables = {name: function.variables[name] for name in own if name in function.variables}
    for name in names:
        if name not in variables and name in function.namespace:
            variables[name] = function.namespace[name]
    for name, value in variables.items():
        if is_module(value):
            yield (name,), value
        elif type(value) is MethodType and is_module(value.__self__):
            yield (name,), value.__self__
        else:
            for key, inner in _inside(value, names, constants):
                if is_module(inner):
                    yield (name, str(key)), inner


def _inside(value: Any, names: list[str], constants: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The values that ``value`` holds under keys and attributes that a function's code names."""
    if issubclass(type(value), dict):
        yield from ((key, dict.get(value, key)) for key in constants)
    elif issubclass(type(value), list | tuple):
        of = list if issubclass(type(value), list) else tuple
        places = [i for i in constants if type(i) is int and 0 <= i < of.__len__(value)]
        yield from ((i, of.__getitem__(value, i)) for i in places)
    elif not issubclass(type(value), type):
        attributes = _attributes(value)
        yield from ((name, attributes[name]) for name in names if name in attributes)


def _attributes(value: Any) -> dict[str, Any]:
    """The instance's own attributes, where Python keeps them; a ``__dict__`` of the class's own
    making is left alone."""
    for cls in type(value).__mro__:
        if "__dict__" in vars(cls):
            slot = vars(cls)["__dict__"]
            if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
                found = slot.__get__(value)
                return found if type(found) is dict else {}
            return {}
    return {}


def _names(code: CodeType) -> list[str]:
    """The names of globals and attributes in a function and in those that are defined in it."""
    return [*code.co_names, *(name for inner in _inner(code) for name in _names(inner))]


def _constants(code: CodeType) -> list[Any]:
    """String and integer constants of a function and of functions defined in it."""
    own = [c for c in code.co_consts if type(c) in (str, int)]
    return list(dict.fromkeys([*own, *(c for inner in _inner(code) for c in _constants(inner))]))


def _inner(code: CodeType) -> list[CodeType]:
    return [c for c in code.co_consts if isinstance(c, CodeType)]


def _named(models: Mapping[Path, nn.Module]) -> dict[str, nn.Module]:
    """Models by name. The variable is left out where the rest tells them apart: self.student and
    self.teacher are student and teacher."""
    short = {".".join(path[1:]): model for path, model in models.items()}
    if len(short) == len(models) and (len(models) == 1 or "" not in short):
        return short
    return {".".join(path[path[0] == "self" and len(path) > 1 :]): m for path, m in models.items()}
