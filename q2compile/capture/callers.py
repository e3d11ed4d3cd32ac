"""What the user calls a model, where one function runs several: ``student``, ``teacher``.

A model that is compiled itself needs no such name. A function that runs two does, if both have an
``up``: under torch.compile(function), whether Dynamo makes one graph of it or breaks it in the
middle of a model, and where blocks of both models are compiled one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch import nn

from q2compile.capture.frames import look
from q2compile.torch_internals.dynamo import compiled_function, is_compiled, is_region

# Where a model was found: a variable, and what leads from there to it.
Path = tuple[str, ...]


def models_in_sight(root: nn.Module | None) -> dict[str, nn.Module]:
    """The models that the user's function knows, by what it calls them; {} if there is no function.

    root    the model that the compiled frame belongs to; None if it is the function's own frame

    A single model that is a variable has the name "", as it had when it was compiled alone.
    """
    region, outside = _split(_frames())
    if root is None or _last_of(root, region) >= 0:
        users = [f for f in region[_last_of(root, region) + 1 :] if _is_users(f)]
        if users:
            return _named(_models(_variables(users[-1])))
        function = compiled_function() if root is None else None
        return _named(_models(_known_to(*function))) if function else {}
    for frame in outside[_last_of(root, outside) + 1 :]:
        if _is_users(frame):
            models = {p: m for p, m in _models(_variables(frame)).items() if _has_compiled(m)}
            if len(models) > 1 and any(root in m.modules() for m in models.values()):
                return _named(models)
    return {}


def _frames() -> list[FrameType]:
    """The frames on the Python stack, innermost first, but for ours: they would hold the list that
    holds them, and with it the variables of all."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if _package(frame) != "q2compile":
            found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _split(frames: list[FrameType]) -> tuple[list[FrameType], list[FrameType]]:
    """Those inside the call of what torch.compile returned, and those around it."""
    for i, frame in enumerate(frames):
        if is_region(frame.f_code):
            return frames[:i], frames[i + 1 :]
    return frames, []


def _last_of(root: nn.Module | None, frames: list[FrameType]) -> int:
    """The index of the outermost method of ``root``; -1 if there is none."""
    methods = [i for i, f in enumerate(frames) if root is not None and _self(f) is root]
    return methods[-1] if methods else -1


def _self(frame: FrameType) -> Any:
    is_method = "self" in frame.f_code.co_varnames[:1]
    owner = look(frame, lambda variables: variables.get("self")) if is_method else None
    return unwrapped(owner) if isinstance(owner, nn.Module) else owner


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _is_users(frame: FrameType) -> bool:
    return _package(frame) != "torch"


def _variables(frame: FrameType) -> dict[str, Any]:
    return look(frame, lambda variables: _known_to(frame.f_code, variables, frame.f_globals))


def _known_to(
    code: CodeType, variables: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """The variables of a function by name: its arguments first, then its others and those of its
    closure, then the globals that it names."""
    own = [*code.co_varnames, *code.co_cellvars, *code.co_freevars]
    found = {name: variables[name] for name in own if name in variables}
    for name in _names(code):
        if name not in found and name in namespace:
            found[name] = namespace[name]
            if isinstance(found[name], ModuleType):  # of which it uses some attributes
                inside = vars(found[name])
                found[name] = _Namespace({n: inside[n] for n in _names(code) if n in inside})
    return found


class _Namespace:
    """Attributes of a Python module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update(attributes)


def _names(code: CodeType) -> list[str]:
    """The names of globals and attributes in a function and in those that are defined in it."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return [*code.co_names, *inner]


def _models(variables: Mapping[str, Any]) -> dict[Path, nn.Module]:
    """The models among variables, in lists, tuples and dicts of them, and in attributes of objects:
    what has a weight of a matmul, and is no part of another one."""
    found: dict[Path, nn.Module] = {}
    for path, value in _values(variables):
        model = unwrapped(value)
        weighs = any(parameter.ndim >= 2 for parameter in model.parameters())
        if weighs and not any(model is other for other in found.values()):
            found[path] = model
    parts = {id(part) for m in found.values() for part in m.modules() if part is not m}
    return {path: model for path, model in found.items() if id(model) not in parts}


def _values(variables: Mapping[str, Any]) -> Iterator[tuple[Path, nn.Module]]:
    for name, value in variables.items():
        if isinstance(value, nn.Module):
            yield (name,), value
        else:
            for key, inner in _inside(value):
                if isinstance(inner, nn.Module):
                    yield (name, str(key)), inner


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).items())


def _named(models: Mapping[Path, nn.Module]) -> dict[str, nn.Module]:
    """Models by name. The variable is left out where the rest tells them apart: self.student and
    self.teacher are student and teacher."""
    short = {".".join(path[1:]): model for path, model in models.items()}
    if len(short) == len(models) and (len(models) == 1 or "" not in short):
        return short
    return {".".join(path[path[0] == "self" and len(path) > 1 :]): m for path, m in models.items()}


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _has_compiled(model: nn.Module) -> bool:
    return any(map(is_compiled, model.modules()))
