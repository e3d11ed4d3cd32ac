# SPDX-License-Identifier: Apache-2.0
"""Runs a worker of this folder on several ranks, with torchrun's environment.

torchrun would have each rank import torch and its compiler, six seconds of CPU time. These
ranks are forks of a process that has imported both (tests/support/forked.py).
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from tests.support import forked

FOLDER = Path(__file__).parent
_GRACE = 60.0  # seconds
_PROGRAM = "import sys; from tests.end_to_end.distributed import ranks; sys.exit(ranks.main())"


def run(
    worker: str, ranks: int, *arguments: str, fails: bool = False, module: str = "q2compile.backend"
) -> str:
    """Run ``worker`` to its end, and return what the ranks print. fails: whether a rank is expected
    to end with an error. module: imported once for all ranks."""
    done = forked.run(_PROGRAM, str(ranks), module, str(FOLDER / worker), *arguments)
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stdout


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _run_rank(rank: int, worker: str) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        runpy.run_path(worker, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    """Start the ranks, and wait for their end."""
    ranks, module, worker = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    importlib.import_module("q2compile.backend")
    importlib.import_module(module)
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(FOLDER))

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    gc.freeze()  # the ranks' collections need not visit what is imported
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = _run_rank(rank, worker)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return _wait(children)


def _wait(children: list[int]) -> int:
    """The status of all. Once a rank has failed, the others have `_GRACE` to end: they may wait for
    it for ever."""
    deadline, failed = math.inf, False
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
            if status:
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE)
        elif time.monotonic() > deadline:
            for rank in children:
                os.kill(rank, signal.SIGKILL)
            deadline = math.inf
        else:
            time.sleep(0.05)
    return int(failed)
