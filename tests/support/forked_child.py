# SPDX-License-Identifier: Apache-2.0
"""The child process of self-checks (check_child.py), as a fork of a process that has imported torch
(forked.py). A new process would import it anew for each child, three seconds of CPU time."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from q2compile.runtime_kernels import check_child
from tests.support import forked

_PROGRAM = """
import os, sys
os.setsid()
for number, (file, flags) in enumerate({files}):
    os.dup2(os.open(file, flags), number)
sys.stdin = open(0)
{program}
"""


class ForkedPython:
    """Has the place of a `subprocess.Popen` that runs ``[python, "-c", program]``."""

    def __init__(self, command: list[str], *, stderr: IO[bytes], env: dict[str, str], **_: Any):
        folder = Path(tempfile.mkdtemp(dir=os.environ["TESTS_COMPILED"]))
        ends = [str(folder / "stdin"), str(folder / "stdout")]
        for end in ends:
            os.mkfifo(end)
        errors = f"/proc/{os.getpid()}/fd/{stderr.fileno()}"
        files = [(ends[0], os.O_RDONLY), (ends[1], os.O_WRONLY), (errors, os.O_WRONLY)]
        self._running = forked.start(_PROGRAM.format(files=files, program=command[2]), **env)
        self.pid, self._status, self._lock = self._running.pid, None, threading.Lock()
        # Each waits until the fork opens the other end.
        self.stdin, self.stdout = open(ends[0], "wb"), open(ends[1], "rb")  # noqa: SIM115

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                self._status = self._running.poll()
            return self._status

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of checks are forks."""
    names = {**vars(subprocess), "Popen": ForkedPython}
    monkeypatch.setattr(check_child, "subprocess", SimpleNamespace(**names))
