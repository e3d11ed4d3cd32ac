# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in processes of its own. They are forks of one process that has imported torch
and its compiler, which takes five seconds of CPU time, and nothing of q2compile.

The process that forks is started by the first test that needs it, and ends with the tests' process.
A variable of the environment that torch reads while it is imported has no effect on a fork.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 600  # seconds until a fork is ended
_LOCK = threading.Lock()  # of the process that forks, which answers one request at a time
# Triton 3.9 prints this at exit, about its own objects.
_LEAKS = re.compile(r"nanobind: leaked .*?/refleaks\.html\n?", re.S)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Running:
    """A process that has been started."""

    pid: int
    folder: tempfile.TemporaryDirectory[str]

    def poll(self) -> int | None:
        """Its exit status, once it has ended; to be asked until it is there."""
        return _ask(poll=self.pid)

    def wait(self) -> Ended:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        with self.folder as folder:
            stdout, stderr = ((Path(folder) / name).read_text() for name in ("1", "2"))
            return Ended(code, stdout, _LEAKS.sub("", stderr))


def start(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> Running:
    """``code`` as the program of a new process, with this one's environment and ``environment``."""
    folder = tempfile.TemporaryDirectory()
    environ = {**os.environ, **environment}
    argv = ["-c", *arguments]
    pid = _ask(code=code, argv=argv, cwd=str(cwd), environ=environ, folder=folder.name)
    assert pid is not None
    return Running(pid, folder)


def run(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> Ended:
    """The same, at its end."""
    return start(code, *arguments, cwd=cwd, **environment).wait()


def start_file(file: Path, *arguments: str, cwd: Path = ROOT, **environment: str) -> Running:
    """A program in a file."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(file.parent)!r}); "
        f"sys.argv[0] = {str(file)!r}; runpy.run_path({str(file)!r}, run_name='__main__')"
    )
    return start(code, *arguments, cwd=cwd, **environment)


def run_file(file: Path, *arguments: str, cwd: Path = ROOT) -> Ended:
    """The same, at its end."""
    return start_file(file, *arguments, cwd=cwd).wait()


def _ask(**request: Any) -> int | None:
    with _LOCK:
        server = _server(os.getpid())
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer: int | None = json.loads(server.stdout.readline())
    return answer


@functools.cache
def _server(process: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.forked"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # which ends its input
    return server


def compile_faster() -> None:
    """Compilers make millions of objects that live on. By CPython's thresholds collections, which
    find little, take up to 12% of a test's time; by these the memory of a process grows by 2%.
    Dynamo empties the processor's caches to measure the guards of each frame, for 27 ms."""
    import torch._dynamo.guards

    gc.set_threshold(200_000, 20, 100)
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0


def main() -> None:
    """Start a fork for each line of stdin, or see if one has ended: the answer is its id, or its
    exit status."""
    import torch._inductor.compile_fx
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.experimental
    import torch.distributed.tensor.parallel
    import torch.export._trace  # noqa: F401

    assert not any(name.startswith("q2compile") for name in sys.modules)
    compile_faster()
    gc.freeze()  # collections of a fork need not visit what is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process ends this one
    while line := sys.stdin.readline():
        request = json.loads(line)
        answer: int | None = None
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            _become(request)
            return
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(_LIMIT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        file = os.path.join(request["folder"], str(output))
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    exec(compile(request["code"], "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
