# SPDX-License-Identifier: Apache-2.0
"""Why a kernel does not run: one of three states, with the reason in words.

    unsupported   it does not serve these arguments, or this device
    rejected      its self-check failed on this machine, or it failed in this process
    disabled      the user named it: option disable_kernels, or Q2COMPILE_DISABLE_KERNELS

A kernel is named by itself, for all ops that have one of that name, or with its op before a point:
"cuda", "quantize.cuda".
"""

from __future__ import annotations

import os
from collections.abc import Iterable

UNSUPPORTED, REJECTED, DISABLED = "unsupported", "rejected", "disabled"
VARIABLE = "Q2COMPILE_DISABLE_KERNELS"
OPTION = "disable_kernels"


class Reason(str):
    """Why a kernel does not run. A reason that is a plain str is of an unsupported call."""

    state: str

    def __new__(cls, text: str, state: str) -> Reason:
        made = super().__new__(cls, text)
        made.state = state
        return made

    def __reduce__(self) -> tuple:
        return Reason, (str(self), self.state)

    def __str__(self) -> str:
        return str.__str__(self)


def rejected(text: str) -> Reason:
    """A self-check that failed, in words."""
    return Reason(f"{REJECTED}: {text}", REJECTED)


def state_of(reason: str) -> str:
    """One of the three."""
    return getattr(reason, "state", UNSUPPORTED)


class NotServedError(ValueError):
    """A kernel that was asked for by name does not serve the arguments."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class DeviceLostError(RuntimeError):
    """The GPU reported an error that it does not recover from: nothing more can run on it in this
    process. The message names the kernel that ran last, and what to do."""


_DISABLED: dict[str, str] = {}  # name -> who disabled it


def disable(names: Iterable[str], who: str) -> None:
    """Has kernels of these names serve no call from now on, in the whole process."""
    for name in names:
        _DISABLED.setdefault(name, who)


def named_in_environment() -> tuple[str, ...]:
    """The names in Q2COMPILE_DISABLE_KERNELS, which has commas between them."""
    given = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return tuple(name for name in given if name)


def why_disabled(op: str, name: str) -> Reason | None:
    """None, or who disabled kernel `name` of an op."""
    if not _DISABLED:
        return None
    who = _DISABLED.get(name) or _DISABLED.get(f"{op}.{name}")
    return who and Reason(f"{DISABLED} by {who}", DISABLED)  # type: ignore[return-value]


def disabled_kernels() -> dict[str, str]:
    """Names of disabled kernels, in order, and who disabled each."""
    return dict(sorted(_DISABLED.items()))


def lost_text(op: str, name: str, device: object, error: BaseException) -> str:
    """The message of a DeviceLostError."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return (
        f"{device} failed after kernel {name!r} of q2::{op} was launched, and can't be used again "
        f"in this process: {said}\n"
        f"Start again with {VARIABLE}={op}.{name}, and another kernel runs in its place. If the "
        "error stays, a kernel that was launched before is at fault: CUDA_LAUNCH_BLOCKING=1 makes "
        "the error name that one."
    )
