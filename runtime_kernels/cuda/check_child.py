# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the child process that runs self-checks (check_process.py).

A thread sends it one check after the other, and reads two messages for each: that it began, and its
result. If the child ends or sends nothing for too long, the check that began last has a strike, and
a new child goes on with the same check: the second strike rejects its kernel. The child ends with
its parent, or when it has been idle.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cuda import check_results
from q2compile.runtime_kernels.cuda.check_results import Check, Request
from q2compile.runtime_kernels.kernel_states import KNOWN, Result

LOG = logging.getLogger("q2compile")
SECONDS = 60.0  # a check may take: Triton compiles in some
MOST_SLOWDOWN = 5.0  # of a busy machine, for which a check gets more time
_LATER = 0.25  # of that, once one took longer: the next may well hang, too
_STARTING = 180.0  # seconds for Python, torch and the first use of the device
_IDLE = 20.0  # seconds, after which a child is ended: it holds memory of the device
_STDERR = 600  # characters of its end
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}\n"
    "from q2compile.runtime_kernels.cuda.check_process import main\n"
    "main()"
)
# The child's answers, and their arguments.
READY, BEGUN, ENDED, LOST, UNABLE = "ready", "begun", "ended", "lost", "unable"


class Unable(NamedTuple):
    """A child can't run a check, and why."""

    why: str


class _Silent(Exception):
    """The child has sent no message for too long: argument, in seconds."""


class _Gone(Exception):
    """The child has ended."""


def _slowdown() -> float:
    """How many times longer work takes because more processes want to run than there are cores. A
    slow machine must not look like a kernel that hangs."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return 1.0
    return min(max(1.0, load / (os.cpu_count() or 1)), MOST_SLOWDOWN)


class _Child:
    """One process."""

    def __init__(self) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["Q2COMPILE_CACHE_DIR"] = str(cache_dir())  # a new temporary one is found once
        environment.pop("TORCH_TRACE", None)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  until the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is its parent's
        )
        self.pid = self._process.pid
        self._messages: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, name="q2-check-child", daemon=True).start()

    def _read(self) -> None:
        with suppress(Exception):  # whatever is wrong with its messages, it is of no use any more
            while True:
                self._messages.put(pickle.load(self._process.stdout))  # type: ignore[arg-type]
        self._messages.put(None)

    def ask(self, request: Request) -> None:
        try:
            pickle.dump((request, check_results.named(request.check[2])), self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError:
            raise _Gone from None

    def next(self, seconds: float) -> tuple[str, Any]:
        """The child's next message. seconds: how long to wait on a machine that is not busy."""
        asked = time.monotonic()
        while True:
            waited = time.monotonic() - asked
            left = seconds * _slowdown() - waited
            try:
                message = self._messages.get(timeout=max(left, 0.0))
                break
            except queue.Empty:
                if left <= 0.0:
                    raise _Silent(waited) from None
        if message is None:
            raise _Gone
        return message

    def end(self) -> str:
        """Ends it, if it has not ended. Returns how it ended, in words."""
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            status = self._process.wait(timeout=1)
            how = f"ended with status {status}" if status >= 0 else _signal(-status)
        except subprocess.TimeoutExpired:
            how = "was stopped"
            self._kill()
        with suppress(OSError, ValueError):
            self._stderr.seek(0)
            message = self._stderr.read().decode(errors="replace").strip()
            self._stderr.close()
            how += f": {' '.join(message[-_STDERR:].split())}" if message else ""
        return how

    def _kill(self) -> None:
        """Kills it and its own children."""
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
            self._process.wait(timeout=10)


def _signal(number: int) -> str:
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"was ended by signal {number}"


class Checker:
    """Runs checks one after the other in a child, which it starts when there is one to run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: queue.Queue[tuple[Request, Sequence[Future], Future]] = queue.Queue()
        self._futures: dict[Check, Future] = {}
        self._thread: threading.Thread | None = None
        self._child: _Child | None = None
        self._unable: Unable | None = None
        self._limit = SECONDS

    def submit(self, request: Request, after: Sequence[Future] = ()) -> Future:
        """A future of the Result of a check, or of Unable. after: futures to wait for before."""
        with self._lock:
            future = self._futures.get(request.check)
            if future is None or (future.done() and isinstance(future.result(), Unable)):
                future = self._futures[request.check] = Future()
                self._asked.put((request, after, future))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name="q2-checks", daemon=True
                    )
                    self._thread.start()
        return future

    def forget(self) -> None:
        """Forget what the child answered, as in a new process."""
        with self._lock:
            self._futures, self._unable = {}, None
            self._limit = SECONDS

    def _serve(self) -> None:
        while True:
            try:
                request, after, future = self._asked.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if not self._asked.empty():
                        continue
                    self.end_child()
                    self._thread = None
                    return
            for each in after:
                each.exception()  # the child meets it, too
            try:
                future.set_result(self._result(request))
            except BaseException as error:  # somebody waits for it
                self.end_child()
                future.set_result(Unable(f"{type(error).__name__}: {error}"))

    def end_child(self) -> str:
        """Ends the child, if there is one, and says how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.end()

    def _result(self, request: Request) -> Result | Unable:
        found, struck = KNOWN.checks, set[Check]()
        while (result := found.get(request.check)) is None:
            if self._unable is not None:
                return self._unable
            began: list[tuple[Request, float]] = []  # and not ended: those inside of others last
            fresh = self._child is None
            try:
                if (unable := self._asked_once(request, began)) is not None:
                    return unable
                continue
            except (_Silent, _Gone) as ended:
                pid = self._child.pid if self._child else None
                how, waited = self.end_child(), ended.args[0] if ended.args else None
            if not began:
                if fresh or waited is not None:  # it fails at something else than a kernel
                    self._unable = Unable(f"the process of self-checks {how}")
                continue  # otherwise it ended after an earlier check, and a new child goes on
            why = f"the process that ran its self-check {how}"
            if waited is not None:
                why = f"its self-check did not end within {waited:.0f} s"
            for each, _ in began:
                check_results.unmark(each, pid)
            last, at = began[-1]
            rejection = check_results.strike(last, why, at, last.check in struck)
            struck.add(last.check)
            if rejection is not None:
                found[last.check] = rejection
                self._limit = self._limit if waited is None else _LATER * SECONDS
        return result

    def _asked_once(self, request: Request, began: list[tuple[Request, float]]) -> Unable | None:
        """Sends a check to the child, and reads its messages until it has answered, or is of no use
        any more. Meanwhile another thread may find the result in the store, where the child, or
        another process, wrote it: the child's answer must be read nevertheless, since the next
        check would take it for its own."""
        child = self._child or self._started()
        if child is None:
            return self._unable
        child.ask(request)
        while True:
            what, message = child.next(self._limit if began else _STARTING)
            if what == BEGUN:
                LOG.debug("q2compile: checks %s", message.label)
                began.append((message, time.time()))
            elif what == ENDED:
                began.pop()
                KNOWN.checks[message[0].check] = message[1]
                if message[0].check == request.check:
                    return None
            elif what == LOST:  # whose kernel is known
                self.end_child()
                return None
            else:
                return Unable(message)

    def _started(self) -> _Child | None:
        LOG.info(
            "q2compile: kernels are checked before their first use on this machine, in a process "
            "of its own; the first start takes longer"
        )
        try:
            self._child = _Child()
            self._child.next(_STARTING)
        except (_Silent, _Gone):
            self._unable = Unable(f"the process of self-checks {self.end_child()}")
        except OSError as error:
            self._unable = Unable(f"no process of self-checks can be started: {error}")
        return self._child if self._unable is None else None
