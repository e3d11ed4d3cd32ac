"""The variables of Python functions that are running, looked at without a trace.

Before Python 3.13 reading ``frame.f_locals`` leaves a dict on the frame, which keeps the value of
each variable alive until the function returns, whatever the function deletes meanwhile: the first
batch, in every caller of a model that is compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def has_variable(frame: FrameType, name: str) -> bool:
    """Whether the code of a frame has a variable of this name; looks at no value."""
    code = frame.f_code
    return name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars


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
