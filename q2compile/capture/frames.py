# SPDX-License-Identifier: Apache-2.0
"""All reads of Python frames. Nothing is written to a frame, and no reference to its values stays.

Two kinds of frames are read while a graph is compiled:

- A running method of an nn.Module, torch's own ``Module.__call__`` among them: its first argument,
  ``self``. Needed for absolute names after a graph break and in blocks that are compiled one by
  one, and for the report's rows, and the errors of ``strict``, of linears that never came.
- The function given to torch.compile, when Dynamo compiles a frame that it calls: its variables
  that are modules, or hold one under a key or an attribute that its code names. Needed for names
  that begin with what a function calls each of its models.

For other frames only code, file and package are read. A frame that Dynamo compiles is not read
either: its contents come from Dynamo.

Before Python 3.13 reading ``frame.f_locals`` leaves a dict on the frame that keeps the value of
each variable alive until the function returns: the first batch, say. `look` empties that dict.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from torch import nn

from q2compile.capture.module_tree import is_module, unwrapped
from q2compile.torch_internals.dynamo import is_region

T = TypeVar("T")

# Identifies the code of a method, also after Dynamo has rewritten it.
_Code = tuple[str, int, str]


@dataclass(frozen=True)
class Running:
    """A frame on the Python stack.

    module      whose method it is, without wrappers; None if it is not a module's method
    is_region   whether it is the call of what torch.compile returned
    frame       the frame itself if it is the user's, None for torch's own
    """

    module: nn.Module | None
    is_region: bool
    frame: FrameType | None


def running() -> list[Running]:
    """The frames on the Python stack, innermost first, without those of q2compile."""
    frames = list(_frames())
    methods = _methods({f.f_code.co_name for f in frames if f.f_code.co_argcount})
    found = []
    for frame in frames:
        code, package = frame.f_code, _package(frame)
        is_method = code.co_argcount > 0 and _code(code) in methods and not _is_called(frame)
        owner = look(frame, _first_argument(code)) if is_method else None
        module = unwrapped(owner) if is_module(owner) else None
        found.append(Running(module, is_region(code), None if package == "torch" else frame))
    return found


def _frames() -> Iterator[FrameType]:
    """The stack without our own frames: they would hold the list, and so the variables of all."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _package(frame) != "q2compile":
            yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _first_argument(code: CodeType) -> Callable[[Mapping[str, Any]], Any]:
    name = code.co_varnames[0]
    return lambda variables: variables.get(name)


def _is_called(frame: FrameType) -> bool:
    """Whether ``Module.__call__`` runs this method, so that its frame holds the module."""
    caller = frame.f_back
    return caller is not None and caller.f_code is nn.Module._call_impl.__code__


def _code(code: CodeType) -> _Code:
    return code.co_filename, code.co_firstlineno, code.co_name


def _methods(names: set[str]) -> set[_Code]:
    """The methods of these names that nn.Module and the classes derived from it define."""
    found, todo, seen = set(), [nn.Module], {nn.Module}
    while todo:
        cls = todo.pop()
        attributes = vars(cls)
        for name in names & attributes.keys():
            method = attributes[name]
            while type(method) is FunctionType:  # what decorates it, and what is decorated
                found.add(_code(method.__code__))
                method = method.__dict__.get("__wrapped__")
        new = [c for c in type.__subclasses__(cls) if c not in seen]
        seen.update(new)
        todo += new
    # A method may be known under another name than its function's: __call__ is _wrapped_call_impl.
    call = nn.Module.__dict__["_wrapped_call_impl"]
    return found | {_code(call.__code__)}


def look(frame: FrameType, read: Callable[[Mapping[str, Any]], T]) -> T:
    """``read`` of the variables of ``frame`` by name; it must not keep the mapping."""
    found: Any = frame.f_locals
    try:
        return read(found)
    finally:
        # Held by the frame, by `found`, and by the call that counts: nobody else has a use for it.
        if _leaves_a_copy(frame) and sys.getrefcount(found) <= 3:
            found.clear()


def _leaves_a_copy(frame: FrameType) -> bool:
    """Whether the frame's f_locals is a copy that can be emptied. The variables of a module are the
    module's own. Where a tracer runs, it has a copy already, and what a debugger changes there
    Python moves to the function afterwards."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return False
    return frame.f_trace is None and sys.gettrace() is None and sys.getprofile() is None
