# SPDX-License-Identifier: Apache-2.0
"""The last launches of this process, for the user of a GPU that failed.

A device error is raised by whichever call waits for the device next, often one in the user's own
code, and names no kernel. So from the first launch on a GPU on, an uncaught error of that kind is
followed by a line on stderr that names the launches before it. Replays of CUDA graphs are none.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch

from q2compile.runtime_kernels.kernel_states import DeviceLostError

_SHOWN = 8
_RECENT: deque[Any] = deque(maxlen=_SHOWN)
# note(launch): what is launched now, as an object whose str() names it. It is called for every
# launch.
note = _RECENT.append
_TYPES = (DeviceLostError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_watching = False


def recent() -> list[str]:
    """Names of the last launches, newest first."""
    return [str(launch) for launch in reversed(_RECENT)]


def watch() -> None:
    """Has an uncaught device error be followed by that line from now on."""
    global _watching
    if _watching:
        return
    _watching, own = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        own(kind, error, trace)
        if _RECENT and (isinstance(error, _TYPES) or "CUDA error" in str(error)):
            print(
                f"q2compile: its last launches before this error, newest first: "
                f"{', '.join(recent())}. One of these may be at fault, or a kernel of others: "
                "CUDA_LAUNCH_BLOCKING=1 makes the error name the call.",
                file=sys.stderr,
            )

    sys.excepthook = hook
