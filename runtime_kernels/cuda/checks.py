# SPDX-License-Identifier: Apache-2.0
"""The self-check of a kernel, before its first use on a machine, in a process where a fault does no
harm.

    rejection(request) None, or why the kernel is rejected; waits for its check
    begin(request)     starts the check, and does not wait
    awaited_together() questions start checks meanwhile, which are awaited at its end

A graph is compiled in such a context, so that its checks run while Inductor works.

All checks of a process run in one child process (check_child.py), one after the other, with a time
limit each. A kernel that traps or hangs there twice is rejected, and a new child goes on with the
others. Results are stored on disk (check_results.py): the next process runs no check.

If no child can run (for want of memory, or since the device admits one process alone), the check
runs in this process, on a stream of its own. If the device then fails, one error names the kernel;
the next process finds the result and does not run it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch

from q2compile.runtime_kernels.cuda import check_results
from q2compile.runtime_kernels.cuda.check_child import Checker, Unable
from q2compile.runtime_kernels.cuda.check_results import Check, Request
from q2compile.runtime_kernels.kernel_states import (
    AWAITED,
    KNOWN,
    DeviceLostError,
    LaunchError,
    NotServedError,
    Result,
    awaited_in,
    lost_text,
    rejected,
    why_disabled,
)
from q2compile.runtime_kernels.registry import failure_text, kernels_own, warn_of_failure
from q2compile.runtime_kernels.small_calls import Form

LOG = logging.getLogger("q2compile")
# Errors that may not occur in the next process, which checks anew.
_PASSING = (OSError, ImportError)
UNENDED = "its self-check did not end in an earlier process"


class Mode(NamedTuple):
    """How this process answers.

    stored: by results of earlier processes, if there are any.
    runs: by running checks.
    in_child: checks run in the child process.
    """

    stored: bool = True
    runs: bool = True
    in_child: bool = True


class Listener(Protocol):
    """Notified of the begin and the result of each check in this process, nested ones too."""

    def begun(self, request: Request) -> None: ...

    def ended(self, request: Request, result: Result) -> None: ...


class _Logs:
    def begun(self, request: Request) -> None:
        LOG.debug("q2compile: checks %s", request.label)

    def ended(self, request: Request, result: Result) -> None:
        pass


class _State:
    mode = Mode()
    listener: Listener = _Logs()


_LOCK, _QUICK = threading.Lock(), threading.Lock()
# The checks that the current code runs in, outermost first: a check must not wait for itself, and
# the outermost one holds the lock. Threads that a check starts inherit them by their context.
_INSIDE: ContextVar[tuple[Check, ...]] = ContextVar("q2compile_checks", default=())
CHECKER = Checker()


@contextmanager
def answering(mode: Mode) -> Iterator[None]:
    """Sets another mode, and forgets the results of this process meanwhile."""
    before, known = _State.mode, dict(KNOWN.checks)
    _State.mode = mode
    KNOWN.checks.clear()
    CHECKER.forget()
    try:
        yield
    finally:
        _State.mode = before
        KNOWN.checks.clear()
        KNOWN.checks.update(known)


def forget() -> None:
    """Forget all about kernels except what is on disk, as in a new process."""
    KNOWN.forget()
    CHECKER.forget()
    check_results.forget_sources()


def rejection(request: Request) -> str | None:
    """None when the kernel may be used, otherwise the reason in words.

    Raises:
        LaunchError: it is still to be checked, and a CUDA graph is being captured.
        DeviceLostError: the device failed at a check in this process.
        torch.OutOfMemoryError: there is no memory for the check.
    """
    check, begun = request.check, AWAITED.get()
    if begun and check in begun:
        return None
    if (found := KNOWN.checks.get(check)) is not None:
        return _reason(request, found)
    if (why := why_disabled(*check[:2])) is not None:
        return why
    inside = _INSIDE.get()
    if check in inside:
        return None
    at_once = inside or (request.here and _State.mode.runs)
    if begun is not None and not at_once and not is_known(request):
        begun[check] = request
        begin(request)
        return None
    with nullcontext() if inside else _QUICK if request.here else _LOCK:
        found = KNOWN.checks.get(check) or _known(request)
        if found is None and not _State.mode.runs:
            return None
        found = KNOWN.checks[check] = found or _checked(request)
    return _reason(request, found)


@contextmanager
def awaited_together() -> Iterator[dict[Check, Request]]:
    """Checks that are asked for meanwhile are awaited at the end (`kernel_states.awaited_in`), also
    if an error is raised, of which a bad kernel may be the cause. Yields them; in the end, those
    whose kernels are rejected."""
    begun: dict[Check, Request] = {}
    try:
        with awaited_in(begun):
            yield begun
    except Exception:
        _keep_rejected(begun)
        raise
    _keep_rejected(begun)


def _keep_rejected(begun: dict[Check, Request]) -> None:
    """Waits for checks, and removes those that passed."""
    try:
        with awaited_in(None):
            for check, request in list(begun.items()):
                if rejection(request) is None:
                    del begun[check]
    except BaseException:
        begun.clear()
        raise


def result_of(request: Request) -> Result | None:
    """The result, if this process has it."""
    return KNOWN.checks.get(request.check)


def begin(request: Request) -> None:
    """Starts a check in the child process, unless its result is known. Threads of this process
    compile its kernels, and the child waits for them."""
    if not is_known(request) and _State.mode.in_child and _State.mode.runs:
        compiling = importlib.import_module(request.module).compiling
        CHECKER.submit(request, compiling(*request.arguments))


def is_known(request: Request) -> bool:
    """Whether the check need not run: it has run, or its kernel is disabled."""
    check = request.check
    if check in KNOWN.checks or why_disabled(*check[:2]) is not None:
        return True
    return _State.mode.stored and check_results.stored(request) is not None


def listen(listener: Listener) -> None:
    """Listen in the child process: checks run in this process, which notifies its parent."""
    _State.listener = listener
    _State.mode = Mode(in_child=False)


def _known(request: Request) -> Result | None:
    """The result of an earlier process."""
    if request.here:
        return None
    if _State.mode.stored:
        return check_results.found(request, UNENDED)
    check_results.take_unended(request)
    return None


def _checked(request: Request) -> Result:
    op, name, device, *_ = request.check
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"kernel {name!r} of q2::{op} is to be checked on this GPU before its first use, "
            "which cannot be done inside a CUDA graph capture: run the model once before "
            "capturing it."
        )
    if _State.mode.in_child and not request.here:
        found = CHECKER.submit(request).result()
        if not isinstance(found, Unable):
            return found
        LOG.info("q2compile: %s is checked in this process: %s", request.label, found.why)
        torch.cuda.empty_cache()  # what this process keeps for later may be what the child lacked
    return run_here(request)


def run_here(request: Request) -> Result:
    """Runs a check in this process, and stores its result.

    Raises:
        DeviceLostError: the device has failed. If this kernel was the cause, the result is stored.
        Exception: what is not the kernel's fault.
    """
    op, name, device, *_ = request.check
    differs: Callable[..., str | None] = importlib.import_module(request.module).disagreement
    start, lasts, numbers = time.perf_counter(), not request.here, None
    token = _INSIDE.set((*_INSIDE.get(), request.check))
    if not request.here:
        check_results.mark(request)
        _State.listener.begun(request)
    try:
        numbers = reason = differs(*request.arguments)
        failed = "its self-check failed" if request.here else "it failed its self-check on this GPU"
        reason = reason and rejected(f"{failed}: {reason}")
        lost = device_error(device)
    except DeviceLostError:
        raise  # of a check inside of this one
    except Exception as error:
        if request.here and isinstance(error, NotServedError):
            raise
        lost = device_error(device)
        if lost is None and not kernels_own(error, op, name, device):
            raise
        reason = failure_text(error)
        lasts = lasts and (lost is not None or not isinstance(error, _PASSING))
    finally:
        _INSIDE.reset(token)
        check_results.unmark(request)
    if lost is not None:
        reason = failure_text(lost)
    result = Result(reason, time.perf_counter() - start, bool(numbers))
    if lasts:
        check_results.store(request, result)
    if not request.here:
        _State.listener.ended(request, result)
    if lost is not None:
        raise DeviceLostError(lost_text(op, name, device, lost)) from lost
    return result


def device_error(device: torch.device) -> Exception | None:
    """The device's error, if one occurred, after all launches have ended."""
    if device.type != "cuda":
        return None
    try:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    except Exception as error:
        return error
    return None


def _reason(request: Request, result: Result) -> str | None:
    """The reason of a result, of which the user is warned."""
    if result.reason is not None:
        op, name, device, *what = request.check
        labels = (part.label for part in what if isinstance(part, Form))
        warn_of_failure(next(labels, op), name, device, result.reason)
    return result.reason
