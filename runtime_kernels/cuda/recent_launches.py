# SPDX-License-Identifier: Apache-2.0
"""The last launches of this process, for the user of a GPU that failed.

A device error is raised by whichever call waits for the device next, often one in the user's own
code, and names no kernel. So from the first launch on a GPU on, an uncaught error of that kind, in
any thread, is followed by a line on stderr that names the launches before it. Errors of the
backward pass are raised in the thread that called it.

Replays of CUDA graphs are no launches of this process. Where there are such graphs, the line also
names the kernels that were launched or captured before, which a replay may have launched.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from typing import Any

import torch

from q2compile.runtime_kernels.kernel_states import DeviceLostError

_SHOWN = 8
_RECENT: deque[Any] = deque(maxlen=512)  # more than the launches of one layer
# note(launch): what is launched now, as an object whose str() names it. It is called for every
# launch.
note = _RECENT.append
_TYPES = (DeviceLostError, *filter(None, [getattr(torch, "AcceleratorError", None)]))
_watching = False


def recent() -> list[str]:
    """Names of the last launches, newest first."""
    return [str(launch) for launch in reversed(_RECENT)][:_SHOWN]


def watch() -> None:
    """Makes that line follow an uncaught device error from now on."""
    global _watching
    if _watching:
        return
    _watching, own, of_threads = True, sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        own(kind, error, trace)
        _name_launches(error)

    def hook_of_threads(args: threading.ExceptHookArgs) -> None:
        of_threads(args)
        _name_launches(args.exc_value)

    sys.excepthook = hook
    threading.excepthook = hook_of_threads


def _name_launches(error: BaseException | None) -> None:
    """Prints the line if this is a device error."""
    if not _RECENT or not (isinstance(error, _TYPES) or "CUDA error" in str(error)):
        return
    replayed = ""
    if any(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects()):
        names = dict.fromkeys(str(launch) for launch in reversed(_RECENT))
        replayed = f"A replay of a CUDA graph may have launched: {', '.join(names)}. "
    print(
        f"q2compile: its last launches before this error, newest first: {', '.join(recent())}. "
        f"{replayed}One of these may be at fault, or a kernel of others: CUDA_LAUNCH_BLOCKING=1 "
        "makes the error name the call.",
        file=sys.stderr,
    )
