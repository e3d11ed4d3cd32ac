# SPDX-License-Identifier: Apache-2.0
"""Why a kernel does not run: one of three states, with the reason in words.

    unsupported   it does not serve these arguments, or this device
    rejected      it failed, in its self-check on this machine or in this process
    disabled      by the user: option disable_kernels, or Q2COMPILE_DISABLE_KERNELS

"cuda" names the kernels of that name of all ops, "quantize.cuda" that of one op.

KNOWN is the one memory of what passed and what was rejected; `KNOWN.forget()` empties it.
check_results.py stores the results of checks on disk.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

UNSUPPORTED, REJECTED, DISABLED = "unsupported", "rejected", "disabled"
VARIABLE = "Q2COMPILE_DISABLE_KERNELS"
OPTION = "disable_kernels"
_LINES = 12  # of a traceback

# Names of kernels, as reports show them and `select` takes them.
REFERENCE = "reference"
CUDA = "cuda"
CPP = "cpp"  # on a CPU
INDUCTOR = "inductor"  # the kernel that Inductor generates for an op
FUSED = "fused"  # CUDA quantizers that compute their operand (prologue fusion), in generated code
GROUPED = "grouped_launch"  # one launch for several calls, in generated code
CUDA_BF16, TRITON_FP4, CUBLASLT_FP4 = "cuda_bf16", "triton_fp4", "cublaslt_fp4"
SCALED_MM, SCALED_GROUPED_MM = "scaled_mm", "scaled_grouped_mm"  # torch's FP8 GEMMs
# The rough cost of another kernel in place of one.
_COSTS = {
    CUDA: "a torch reference takes 10 to 30 times as long",
    CPP: "a torch reference takes several times as long",
    FUSED: "a gradient is written and read once more",
    GROUPED: "each call is launched by itself, which takes some microseconds more",
    INDUCTOR: "a kernel that nothing is fused with, or a torch reference that takes 10 to 30 times "
    "as long",
    **dict.fromkeys(
        (CUBLASLT_FP4, TRITON_FP4),
        "another FP4 GEMM, or one in BF16, which takes 2 to 4 times as long",
    ),
}


class KernelWarning(RuntimeWarning):
    """A kernel failed, and another runs in its place."""


class Reason(str):
    """Why a kernel does not run. A reason that is a plain str means that a call is unsupported.

    traceback: the last lines, if an exception is the reason. They go to the parent of a process of
        self-checks, and not to disk.
    """

    state: str
    traceback: list[str]

    def __new__(cls, text: str, state: str, traceback: Iterable[str] = ()) -> Reason:
        made = super().__new__(cls, text)
        made.state, made.traceback = state, list(traceback)
        return made

    def __reduce__(self) -> tuple:
        return Reason, (str(self), self.state, self.traceback)


def rejected(text: str, error: BaseException | None = None) -> Reason:
    """The reason of a kernel that failed. error: what it raised."""
    return Reason(f"{REJECTED}: {text}", REJECTED, lines_of(error) if error else ())


def lines_of(error: BaseException) -> list[str]:
    """The last lines of its traceback."""
    return traceback.format_exception(error)[-_LINES:]


def state_of(reason: str) -> str:
    """The state of a kernel with this reason: one of the three above."""
    return getattr(reason, "state", UNSUPPORTED)


class Result(NamedTuple):
    """The result of a check.

    reason: None if the kernel passed, otherwise why it is rejected.
    differs: whether it is rejected because its numbers are wrong. Any other rejection may come from
        the moment, and expires.
    """

    reason: str | None
    differs: bool = False


class KnownResults:
    """Everything that a process has found out about kernels.

    calls: the kind of a call -> why the kernel was rejected for it.
    choices: the kind of a call, and how many checks have ended -> the kernel that runs it, by all
        the rest (choice.py).
    checks: a check -> its result: self-checks, on a GPU and a CPU, and first large GEMMs.
    references: an op -> why its reference serves a GPU.
    sources: what did not compile -> the compiler's log, which takes seconds to get.
    warned: an op, a kernel and a device -> the first reason, of which the user was warned.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, Reason] = {}
        self.choices: dict[Hashable, Any] = {}
        self.checks: dict[tuple, Result] = {}
        self.references: dict[str, str] = {}
        self.sources: dict[Hashable, str] = {}
        self.warned: dict[tuple[str, str, torch.device], str] = {}

    def forget(self) -> None:
        """Forget what is known about kernels, as in a new process."""
        for memory in vars(self).values():
            memory.clear()


KNOWN = KnownResults()


class LaunchError(RuntimeError):
    """The CUDA driver or a library refused to load or to launch a kernel."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory was missing. That depends on the moment, and says nothing
    about a kernel. torch and Triton raise errors of several classes for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = "out of memory", "allocate memory", "alloc_failed"
    return any(each in str(error).lower() for each in words)


class NotServedError(ValueError):
    """A kernel that was asked for by name does not serve the arguments."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class DeviceLostError(RuntimeError):
    """The GPU reported an error that it does not recover from: nothing can run on it any more in
    this process. The message names the kernel that ran last, and what to do."""


class Noted(dict):
    """Checks that are asked for and do not begin (`awaited_in`)."""


AWAITED: ContextVar[dict | None] = ContextVar("q2compile_awaited", default=None)
ONE_MULTIPROCESSOR: ContextVar[bool] = ContextVar("q2compile_one_multiprocessor", default=False)
_DISABLED: dict[str, str] = {}  # name -> who disabled it
_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("q2compile_assumed_gpu", default=None)


@contextmanager
def _during(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def assumed_gpu(capability: tuple[int, int]) -> AbstractContextManager[None]:
    """Kernels answer as on a GPU of this compute capability, which need not be there: all that are
    made for it work, and none is disabled. For questions only; nothing can be launched."""
    return _during(_ASSUMED, capability)


def assumed_capability() -> tuple[int, int] | None:
    """The compute capability of the GPU that is assumed; None outside of `assumed_gpu`."""
    return _ASSUMED.get()


def awaited_in(begun: dict | None) -> AbstractContextManager[None]:
    """Kernels that are still to be checked count as good meanwhile. Their self-checks begin when
    they are asked for, unless `begun` is Noted, and are added to it, to be awaited later
    (checks.py). None: a question waits for its check, as it does outside of such a context."""
    return _during(AWAITED, begun)


def on_one_multiprocessor() -> AbstractContextManager[None]:
    """Plans grids as for a device with one multiprocessor, so that each thread block has several
    tiles even of small operands."""
    return _during(ONE_MULTIPROCESSOR, True)


def disable(names: Iterable[str], who: str) -> None:
    """Disables kernels of these names in the whole process."""
    for name in names:
        _DISABLED.setdefault(name, who)
    KNOWN.choices.clear()


def enable_all() -> None:
    """No kernel is disabled any more."""
    _DISABLED.clear()
    KNOWN.choices.clear()


def named_in_environment() -> tuple[str, ...]:
    """The names in Q2COMPILE_DISABLE_KERNELS, separated by commas."""
    given = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return tuple(name for name in given if name)


disable(named_in_environment(), VARIABLE)


def why_disabled(op: str, name: str) -> Reason | None:
    """None if kernel `name` of an op is not disabled, otherwise by whom."""
    if not _DISABLED or assumed_capability():
        return None
    who = _DISABLED.get(name) or _DISABLED.get(f"{op}.{name}")
    return who and Reason(f"{DISABLED} by {who}", DISABLED)  # type: ignore[return-value]


def disabled_kernels() -> dict[str, str]:
    """Names of disabled kernels, in order, and who disabled each."""
    return dict(sorted(_DISABLED.items()))


def lost_text(op: str, name: str, device: object, error: BaseException) -> str:
    """The message of a DeviceLostError."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return (
        f"{device} failed after kernel {name!r} of q2::{op} was launched, and can't be used again "
        f"in this process: {reason}\n"
        f"Start again with {VARIABLE}={op}.{name}, and another kernel runs in its place. If the "
        "error stays, a kernel that was launched before is at fault: CUDA_LAUNCH_BLOCKING=1 makes "
        "the error name that one."
    )


def kernels_own(error: Exception, op: str, name: str, device: torch.device) -> bool:
    """True if the kernel that raised this error is to be rejected. Missing memory is no reason,
    since there may be enough the next time, nor is an error in a CUDA graph capture, whose graph is
    lost anyway.

    Raises:
        DeviceLostError: the device has failed, whichever kernel was the cause.
    """
    if lacks_memory(error) or isinstance(error, DeviceLostError):
        return False
    if device.type != "cuda":
        return True
    try:
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLostError(lost_text(op, name, device, lost)) from error
    return True


def failure_text(error: Exception) -> Reason:
    """The reason why a kernel that raised this is rejected."""
    return rejected(f"it failed: {type(error).__name__}: {error}"[:2000].rstrip(), error)


def warn_of_failure(op: str, name: str, device: torch.device, reason: str) -> None:
    """Warns that a kernel is rejected, once for each kernel and device, and adds it to reports."""
    if (op, name, device) not in KNOWN.warned:
        KNOWN.warned[op, name, device] = reason
        warnings.warn(
            f"q2compile: kernel {name!r} of q2::{op} on {device} is {reason}\n"
            f"Another runs in its place: {_COSTS.get(name, 'slower')}. "
            "`q2compile doctor --recheck` checks rejected kernels again.",
            KernelWarning,
            stacklevel=2,
        )
