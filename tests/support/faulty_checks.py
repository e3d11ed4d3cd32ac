# SPDX-License-Identifier: Apache-2.0
"""Self-checks that end in every way a check of a kernel can, for the process that runs them; and
processes for them that are forks of the tests' process, which saves the import of torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q2compile.runtime_kernels.cuda import check_child, check_process, checks
from q2compile.runtime_kernels.cuda.check_results import Request

DEVICE = torch.device("cpu")


def request(how: str, folder: Path, name: str = "broken", op: str = "gemm") -> Request:
    """A check of a kernel that ends so. folder: where each run leaves a file."""
    return Request((op, name, DEVICE, how), __name__, (how, str(folder)))


def runs(folder: Path) -> list[str]:
    """How the checks end that were run so far."""
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def disagreement(how: str, folder: str) -> str | None:
    """Ends as `how` says."""
    (Path(folder) / f"{how}-{time.time_ns()}").touch()
    if how == "trap":
        os.kill(os.getpid(), signal.SIGILL)
    if how == "hang":
        time.sleep(1000)
    if how == "slow":
        time.sleep(2)
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if how == "raises":
        raise AssertionError("no scaled dot on sm_121")
    if how == "illegal":  # the context is lost, and all that follows fails
        error = RuntimeError("CUDA error: an illegal instruction was encountered")
        checks._device_error = lambda device: error  # type: ignore[assignment]
        raise error
    if how.startswith("inside "):  # another kernel runs in this one's check
        inner = request(how.removeprefix("inside "), Path(folder), "inner", "dequantize")
        assert checks.rejection(inner) is not None
    return "1 of 9 codes differ from the reference" if how == "wrong" else None


def fork_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that run checks are forks of this process. A program of a test's own is executed."""
    of_checks = check_child._PROGRAM.format(path=sys.path)

    class Forked(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **how: Any) -> None:
            own = {"preexec_fn": _serve_checks} if command[-1] == of_checks else {}
            super().__init__(command, **own, **how)

    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(check_child, "subprocess", replaced)


def _serve_checks() -> None:
    """In a fork whose standard files are set: what the child's program does, and the end."""
    try:
        faulthandler.disable()  # its file is closed next
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # one of them tells Popen to go on
        sys.stdin, sys.stderr = os.fdopen(0), os.fdopen(2, "w")
        checks._RESULTS.clear()
        checks._LOCK = threading.Lock()
        check_process.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
