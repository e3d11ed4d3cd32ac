# SPDX-License-Identifier: Apache-2.0
"""The child process that runs self-checks for its parent (check_child.py).

It reads one check after the other from stdin. To its first stdout it writes a message when a check
begins, and one with the result when it ends; all other output goes to stderr. It ends with its
parent, or when the device has failed.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import traceback
from typing import Any

from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.check_child import (
    BEGUN,
    ENDED,
    LOST,
    MOST_SLOWDOWN,
    READY,
    SECONDS,
    UNABLE,
)
from q2compile.runtime_kernels.cuda.check_results import Request, named
from q2compile.runtime_kernels.kernel_states import DeviceLostError, Result


class _ToParent:
    def __init__(self) -> None:
        self._channel = os.fdopen(os.dup(1), mode="wb")
        os.dup2(2, 1)

    def send(self, what: str, more: Any = None) -> None:
        pickle.dump((what, more), self._channel)
        self._channel.flush()

    def begun(self, request: Request) -> None:
        left_alone = 2 * MOST_SLOWDOWN * SECONDS  # its parent is gone
        faulthandler.dump_traceback_later(left_alone, exit=True)
        self.send(BEGUN, request)

    def ended(self, request: Request, result: Result) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.send(ENDED, (request, result))


def main() -> None:
    """Ends with the process."""
    parent = _ToParent()
    checks.listen(parent)
    parent.send(READY)
    while True:
        try:
            request, of_parent = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            own = named(request.check[2])
            if own != of_parent:
                parent.send(UNABLE, f"it sees another device, {own}")
            else:
                checks.run_here(request)
        except DeviceLostError:
            parent.send(LOST)
            os._exit(0)
        except Exception as error:  # no fault of the kernel's
            traceback.print_exc()
            parent.send(UNABLE, f"{type(error).__name__}: {error}"[:500])
