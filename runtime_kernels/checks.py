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

import faulthandler
import importlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

import torch

from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.check_child import (
    BEGUN,
    CHECKER,
    ENDED,
    IDLE,
    LOST,
    MOST_SLOWDOWN,
    SECONDS,
    UNABLE,
)
from q2compile.runtime_kernels.check_results import Check, Request
from q2compile.runtime_kernels.kernel_states import (
    AWAITED,
    KNOWN,
    DeviceLostError,
    LaunchError,
    Noted,
    NotServedError,
    Result,
    awaited_in,
    failure_text,
    kernels_own,
    lost_text,
    rejected,
    warn_of_failure,
    why_disabled,
)

# Errors that may not occur in the next process, which checks anew.
_PASSING = (OSError, ImportError)
UNENDED = "its self-check did not end in an earlier process"


class _State:
    """How this process answers.

    stored: by results of earlier processes, if there are any.
    in_child: checks run in the child process.
    told: called with each check in this process that begins, and with its result when it has ended;
        nested ones too.
    """

    stored = True
    in_child = True
    told: Callable[[Request, Result | None], None] = check_results.log_begun


_LOCK = threading.Lock()
# The checks that the current code runs in, outermost first: a check must not wait for itself, and
# the outermost one holds the lock, unless it runs here. Threads that a check starts inherit them by
# their context.
_INSIDE: ContextVar[tuple[Check, ...]] = ContextVar("q2compile_checks", default=())


@contextmanager
def answering(stored: bool = True, in_child: bool = True) -> Iterator[None]:
    """Answers otherwise meanwhile (_State), and not by the results of this process."""
    before, known = (_State.stored, _State.in_child), KNOWN.checks
    _State.stored, _State.in_child = stored, in_child
    KNOWN.checks = {}
    KNOWN.choices.clear()
    CHECKER.forget()
    try:
        yield
    finally:
        _State.stored, _State.in_child = before
        KNOWN.checks = known
        KNOWN.choices.clear()


def forget() -> None:
    """Forget all about kernels except what is on disk, as in a new process."""
    KNOWN.forget()
    CHECKER.forget()
    check_results.sources_of.cache_clear()


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
    if begun is not None and not inside and not (_State.stored and check_results.stored(request)):
        is_noted = isinstance(begun, Noted)
        if is_noted or not request.here:
            begun[check] = request
            if not is_noted:
                begin(request)
            return None
    with nullcontext() if inside or request.here else _LOCK:
        try:
            found = KNOWN.checks[check] = KNOWN.checks.get(check) or _result(request)
        except NotServedError as error:  # the call is wrong, and the reference says so
            return str(error)
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


def begin(request: Request) -> None:
    """Starts a check in the child process. Threads of this process compile its kernels, and the
    child waits for them."""
    if _State.in_child:
        compiling = getattr(importlib.import_module(request.module), "compiling", None)
        begun: Sequence[Future] = ()
        if compiling is not None:
            try:
                begun = compiling(*request.arguments)
            except Exception:  # the check, which launches the same, then compiles for itself
                check_results.LOG.debug("q2compile: %s", request.label, exc_info=True)
        CHECKER.begin(request, begun)


def _result(request: Request) -> Result:
    """The result of an earlier process, or of the check, which runs now."""
    if request.here:
        return run_here(request)
    if _State.stored:
        if (known := check_results.found(request, UNENDED)) is not None:
            return known
    else:
        check_results.take_unended(request)
    op, name, device, *_ = request.check
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"kernel {name!r} of q2::{op} is to be checked on this GPU before its first use, "
            "which cannot be done inside a CUDA graph capture: run the model once before "
            "capturing it."
        )
    if _State.in_child:
        CHECKER.run(request)
        if (found := KNOWN.checks.get(request.check)) is not None:
            return found
        torch.cuda.empty_cache()  # what this process keeps for later may be what the child lacked
    return run_here(request)


def run_here(request: Request) -> Result:
    """Runs a check in this process, and stores its result.

    Raises:
        DeviceLostError: the device has failed. If this kernel was the cause, the result is stored.
        Exception: what is not the kernel's fault.
    """
    op, name, device, *_ = request.check
    disagreement: Callable[..., str | None] = importlib.import_module(request.module).disagreement
    differs, lost, lasts = False, None, True
    token = _INSIDE.set((*_INSIDE.get(), request.check))
    if not request.here:
        check_results.mark(request)
        _State.told(request, None)
    try:
        reason = disagreement(*request.arguments)
        differs = reason is not None
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
        lasts = lost is not None or not isinstance(error, _PASSING)
    finally:
        _INSIDE.reset(token)
        check_results.unmark(request)
    if lost is not None:
        reason = failure_text(lost)
    result = Result(reason, differs)
    if not request.here:
        if lasts:
            check_results.store(request, result)
        _State.told(request, result)
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
        op, name, device, what, *_ = request.check
        warn_of_failure(getattr(what, "label", op), name, device, result.reason)
    return result.reason


def serve() -> None:
    """In the child process: runs the checks that the parent asks for."""
    asked, answers = Connection(0, writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)

    def tell(what: str, more: Any = None) -> None:
        with suppress(OSError):  # its parent is gone
            answers.send((what, more))

    def told(request: Request, result: Result | None) -> None:
        if result is None:
            left_alone = 2 * MOST_SLOWDOWN * SECONDS
            faulthandler.dump_traceback_later(left_alone, exit=True)
            tell(BEGUN, request)
        else:
            faulthandler.cancel_dump_traceback_later()
            tell(ENDED, (request, result))

    _State.in_child, _State.told = False, told
    while asked.poll(IDLE):
        try:
            request, of_parent = asked.recv()
        except EOFError:
            break
        try:
            own = check_results.named(request.check[2])
            if own == of_parent:
                run_here(request)
            else:
                tell(UNABLE, f"it sees another device, {own}")
        except DeviceLostError:
            tell(LOST)
            os._exit(0)
        except Exception as error:  # no fault of the kernel's
            traceback.print_exc()
            tell(UNABLE, f"{type(error).__name__}: {error}"[:500])
    os._exit(0)  # results are stored; a driver's own end could hang
