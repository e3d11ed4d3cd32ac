# SPDX-License-Identifier: Apache-2.0
"""The child process that runs self-checks (`checks.serve`), from its parent's side.

Threads of the parent send one check after the other. The child sends a message when a check
begins, and one with the result when it ends; its other output goes to stderr. If it ends, or sends
nothing for too long, the check that began last has a strike, and a new child goes on with the same
check: the second strike rejects its kernel. The child ends with its parent, when it has been idle,
or when the device has failed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.check_results import Check, Request
from q2compile.runtime_kernels.kernel_states import KNOWN

LOG = logging.getLogger("q2compile")
SECONDS = 60.0  # a check may take: Triton compiles in some
MOST_SLOWDOWN = 5.0  # of a busy machine, for which a check gets more time
_LATER = 0.25  # of that, once one took longer: the next may well hang, too
_STARTING = 180.0  # seconds for Python, torch and the first use of the device
IDLE = 20.0  # seconds, after which a child ends: it holds memory of the device
_STDERR = 600  # characters of its end
PROGRAM = (
    "import sys; sys.path[:] = {path!r}\n"
    "from q2compile.runtime_kernels.checks import serve\n"
    "serve()"
)
# The child's messages, and what comes with them.
BEGUN, ENDED, LOST, UNABLE = "begun", "ended", "lost", "unable"


class UnableError(Exception):
    """A child can't run a check; the message says why."""


class _SilentError(Exception):
    """The child has ended; or it sent nothing for so many seconds, which are the argument."""


def _slowdown() -> float:
    """How many times longer work takes because more processes want to run than there are cores. A
    slow machine must not look like a kernel that hangs."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return 1.0
    return min(max(1.0, load / (os.cpu_count() or 1)), MOST_SLOWDOWN)


class _Child:
    """One process, and the ends of its pipes."""

    def __init__(self) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["Q2COMPILE_CACHE_DIR"] = str(cache_dir())  # a new temporary one is found once
        environment.pop("TORCH_TRACE", None)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  until the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is its parent's
        )
        self.pid = self._process.pid
        # Takes its status when it ends of itself, idle: otherwise a zombie would be left.
        threading.Thread(target=self._process.wait, daemon=True).start()
        pipes: Any = self._process.stdin, self._process.stdout
        self.asked = Connection(os.dup(pipes[0].fileno()), readable=False)
        self._answers = Connection(os.dup(pipes[1].fileno()), writable=False)
        for pipe in pipes:
            pipe.close()

    def ask(self, request: Request) -> None:
        try:
            self.asked.send((request, check_results.named(request.check[2])))
        except OSError:
            raise _SilentError from None

    def next(self, seconds: float) -> tuple[str, Any]:
        """The child's next message. seconds: how long to wait on a machine that is not busy."""
        asked = time.monotonic()
        try:
            while not self._answers.poll(
                max(0.0, left := seconds * _slowdown() - (waited := time.monotonic() - asked))
            ):
                if left <= 0.0:
                    raise _SilentError(waited)
            message: tuple[str, Any] = self._answers.recv()
            return message
        except (EOFError, OSError):
            raise _SilentError from None

    def end(self) -> str:
        """Ends it and its own children, if it has not ended. Returns how it ended, in words."""
        self.asked.close()
        try:
            status = self._process.wait(timeout=1)
            how = f"ended with status {status}"
            if status < 0:
                names = {each.value: each.name for each in signal.Signals}
                how = f"was ended by {names.get(-status, f'signal {-status}')}"
        except subprocess.TimeoutExpired:
            how = "was stopped"
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
                self._process.wait(timeout=10)
        self._answers.close()
        with suppress(OSError, ValueError), self._stderr:
            self._stderr.seek(0)
            message = self._stderr.read().decode(errors="replace").strip()
            how += f": {' '.join(message[-_STDERR:].split())}" if message else ""
        return how


def _log_unable(request: Request, error: Exception) -> None:
    text = "q2compile: no other process can check %s, so this one does: %s"
    LOG.info(text, request.label, error)


class Checker:
    """Has a child run checks, one after the other, and starts it when there is one to run."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the thread whose check the child runs
        self._child: _Child | None = None
        self.forget()

    def forget(self) -> None:
        """Forget how the child ended, as in a new process."""
        self._threads: dict[Check, threading.Thread] = {}
        self._unable, self._limit = "", SECONDS

    def begin(self, request: Request, after: Sequence[Future] = ()) -> None:
        """Starts a thread that has the child run a check, unless there is one. KNOWN has the result
        when it ends, if the child can run the check. after: futures to wait for before."""
        thread = self._threads.get(request.check)
        if thread is None or not thread.is_alive():
            # A daemon does not keep the process from ending.
            thread = threading.Thread(target=self._serve, args=(request, after), daemon=True)
            try:
                thread.start()
                self._threads[request.check] = thread
            except RuntimeError as error:  # as under a limit of processes
                _log_unable(request, error)

    def run(self, request: Request) -> None:
        """Waits until the check has run in the child, if it can."""
        self.begin(request)
        if (thread := self._threads.get(request.check)) is not None:
            thread.join()

    def end_child(self) -> str:
        """Ends the child, if there is one, and says how it ended."""
        child, self._child = self._child, None
        return "" if child is None else child.end()

    def _serve(self, request: Request, after: Sequence[Future]) -> None:
        try:
            for each in after:
                each.exception()  # the child meets it, too
            with self._turn:
                self._answer(request)
        except Exception as error:
            _log_unable(request, error)

    def _answer(self, request: Request) -> None:
        struck = set[Check]()
        while request.check not in KNOWN.checks:
            began: list[tuple[Request, float]] = []  # and not ended: those inside of others last
            fresh = self._child is None
            try:
                self._ask(request, began)
                continue
            except _SilentError as silence:
                how, waited = self.end_child(), silence.args[0] if silence.args else None
            if not began:
                if fresh or waited is not None:  # it fails at something else than a kernel
                    self._unable = f"the process of self-checks {how}"
                continue  # otherwise it ended between two checks, and a new child goes on
            why = f"the process that ran its self-check {how}"
            if waited is not None:
                why = f"its self-check did not end within {waited:.0f} s"
            for each, _ in began:
                check_results.take_unended(each)
            last, at = began[-1]
            rejection = check_results.strike(last, why, at, last.check in struck)
            struck.add(last.check)
            if rejection is not None:
                KNOWN.checks[last.check] = rejection
                self._limit = self._limit if waited is None else _LATER * SECONDS

    def _ask(self, request: Request, began: list[tuple[Request, float]]) -> None:
        """Sends a check to the child, and reads its messages until it has answered, or is of no use
        any more. Meanwhile another thread may find the result in the store, where the child, or
        another process, wrote it: the child's answer must be read nevertheless, since the next
        check would take it for its own."""
        child = self._child = self._child or self._started()
        child.ask(request)
        while True:
            what, message = child.next(self._limit if began else _STARTING)
            if what == BEGUN:
                check_results.log_begun(message, None)
                began.append((message, time.time()))
            elif what == ENDED:
                began.pop()
                KNOWN.checks[message[0].check] = message[1]
                if message[0].check == request.check:
                    return
            elif what == LOST:  # whose kernel is known
                self.end_child()
                return
            else:
                raise UnableError(message)

    def _started(self) -> _Child:
        if self._unable:
            raise UnableError(self._unable)
        LOG.info(
            "q2compile: kernels are checked before their first use on this machine, in a process "
            "of its own; the first start takes longer"
        )
        try:
            return _Child()
        except OSError as error:
            self._unable = f"no process of self-checks can be started: {error}"
            raise UnableError(self._unable) from None


CHECKER = Checker()
