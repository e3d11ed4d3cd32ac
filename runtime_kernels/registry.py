# SPDX-License-Identifier: Apache-2.0
"""The ops of namespace q2 and the kernels behind them.

`define` makes an op of its reference: schema, fake, and a body that dispatches on the device of its
first tensor. `kernel` registers another implementation. A call runs the one that `choose` finds
(choice.py): the first that serves the device and the arguments, the newest registration first, and
at last the torch reference, which serves every call.

`select` returns one implementation by name, and never another in its place.

A kernel may fail in its self-check or when it runs. Then it is rejected for calls of that kind,
with a KernelWarning, and the next one serves them. A kernel that the user has disabled never runs
(kernel_states.py).
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from q2compile.runtime_kernels.choice import (
    KERNELS,
    MOST_KINDS,
    Choice,
    Kernel,
    add,
    choose,
    device_of,
    first_of,
    kernel_named,
    kernels,
    kind_of_call,
)
from q2compile.runtime_kernels.kernel_states import (
    AWAITED,
    KNOWN,
    UNSUPPORTED,
    NotServedError,
    awaited_in,
    disabled_kernels,
    failure_text,
    kernels_own,
    state_of,
    warn_of_failure,
)
from q2compile.runtime_kernels.kernel_states import CPP as CPP
from q2compile.runtime_kernels.kernel_states import CUBLASLT_FP4 as CUBLASLT_FP4
from q2compile.runtime_kernels.kernel_states import CUDA as CUDA
from q2compile.runtime_kernels.kernel_states import CUDA_BF16 as CUDA_BF16
from q2compile.runtime_kernels.kernel_states import FUSED as FUSED
from q2compile.runtime_kernels.kernel_states import GROUPED as GROUPED
from q2compile.runtime_kernels.kernel_states import INDUCTOR as INDUCTOR
from q2compile.runtime_kernels.kernel_states import REFERENCE as REFERENCE
from q2compile.runtime_kernels.kernel_states import SCALED_GROUPED_MM as SCALED_GROUPED_MM
from q2compile.runtime_kernels.kernel_states import SCALED_MM as SCALED_MM
from q2compile.runtime_kernels.kernel_states import TRITON_FP4 as TRITON_FP4
from q2compile.runtime_kernels.kernel_states import KernelWarning as KernelWarning

LOG = logging.getLogger("q2compile")
LIBRARY = torch.library.Library("q2", "DEF")

_AS_IT_IS = nullcontext()


def define(
    schema: str,
    *,
    fake: Callable,
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Callable], Callable]:
    """Decorator of a reference: makes torch.ops.q2.<name> from a schema, with a fake that must hold
    for symbolic shapes.

    The fake is the op's kernel for meta tensors, which FakeTensorMode calls, too. Each tensor that
    `torch.library.register_fake` makes goes through the dispatcher of fakes: a call of q2::quantize
    takes twice as long then (1.14 ms and 0.58), and a compilation makes five calls per node.

    The body is opaque to AOTAutograd and Inductor (CompositeExplicitAutograd): graphs show only the
    op. Operands may have any strides (flexible_layout). By default Inductor would give them the
    strides seen in tracing, even after a pass has given the node other operands.
    """
    name = schema.partition("(")[0]
    KERNELS.setdefault(name, [])

    def call(*args, **kwargs):
        given = bound(name, args, kwargs)
        with _without_autocast(device_of(given).type), _checked_at_once():
            return run_chosen(choose(name, given), given)

    def call_fake(*args, **kwargs):
        made = fake(*bound(name, args, kwargs))
        return tuple(made) if isinstance(made, list) else made  # torch caches no list of fakes

    own = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    LIBRARY.define(schema, tags=(*own, *tags))
    LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    LIBRARY.impl(name, call_fake, "Meta")
    return kernel(name, REFERENCE)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """The arguments of an op say in which dtype it computes. Kernels that call torch's matmul would
    compute in another one in a backward pass that runs under autocast."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _AS_IT_IS


def _checked_at_once() -> AbstractContextManager[Any]:
    """A call that runs waits for checks, also while a graph is compiled: constants are folded."""
    return _AS_IT_IS if AWAITED.get() is None else awaited_in(None)


@functools.cache
def parameters(op: str) -> tuple[tuple[str, Any], ...]:
    """The names of an op's arguments, in order, and their defaults (None where there is none)."""
    arguments = getattr(torch.ops.q2, op).default._schema.arguments
    return tuple((a.name, a.default_value if a.has_default_value() else None) for a in arguments)


def bound(op: str, args: Sequence, kwargs: Mapping[str, Any]) -> tuple:
    """All arguments of a call in the order of the op's schema, defaults among them: how kernels are
    called."""
    names = parameters(op)
    if len(args) == len(names):
        return tuple(args)
    return (*args, *(kwargs.get(name, default) for name, default in names[len(args) :]))


def as_written(op: str, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs of a call from all its arguments by name, as torch writes them: keywords for
    what the schema has behind its *, less those that have their default."""
    arguments = getattr(torch.ops.q2, op).default._schema.arguments
    args = tuple(named[a.name] for a in arguments if not a.kwarg_only)
    kwargs = {
        a.name: named[a.name]
        for a in arguments
        if a.kwarg_only and not (a.has_default_value() and _same(named[a.name], a.default_value))
    }
    return args, kwargs


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(default, bool | int | str) and value == default)


def call_op(op: str, args: Sequence) -> Any:
    """The result of torch.ops.q2.<op> for all its arguments, in the order of its schema."""
    names = (name for name, _ in parameters(op))
    positional, keywords = as_written(op, dict(zip(names, args, strict=True)))
    return getattr(torch.ops.q2, op).default(*positional, **keywords)


def run_chosen(choice: Choice, args: tuple, failed: Sequence[Kernel] = ()):
    """The result of the kernel that was chosen, or of the first one after it that does not fail.

    When none can, what the first one raised: the fault is the caller's then, or the device's.

    failed: kernels that have failed with these arguments.
    """
    kernel, device = choice.kernel, device_of(args)
    if kernel.name == REFERENCE and device.type == "cuda" and not failed:
        _say_why_reference(choice, args)
    try:
        return kernel.function(*args)
    except Exception as error:
        if kernel.name == REFERENCE or not kernels_own(error, kernel.op, kernel.name, device):
            raise
        failed = (*failed, kernel)
        others = [each for each in kernels(kernel.op) if each not in failed]
        try:
            result = run_chosen(first_of(others, args), args, failed)
        except Exception:
            raise error  # noqa: B904  the errors of the others are its context
        reject(kernel, args, error)
        return result


def _say_why_reference(choice: Choice, args: Sequence) -> None:
    """Logs why no kernel serves a call on a GPU, once for each op, and adds it to reports. Kernels
    that are rejected or disabled are reported elsewhere (`left_out`). The reference of a recorded
    call makes the same call without its statistics, which then says it (ops/recorded.py)."""
    op, device = choice.kernel.op, device_of(args)
    if op in KNOWN.references or _is_recorded(op, args):
        return
    of_device = {each.name for each in kernels(op) if each.device_type == device.type}
    reasons = {name: why for name, why in choice.why_not.items() if name in of_device}
    if {state_of(why) for why in reasons.values()} == {UNSUPPORTED}:
        words = "; ".join(f"{name}: {' '.join(str(why).split())}" for name, why in reasons.items())
        KNOWN.references[op] = f"q2::{op} on {device} runs as its torch reference: {words}"
        LOG.info("q2compile: %s", KNOWN.references[op])


def _is_recorded(op: str, args: Sequence) -> bool:
    return any(
        name == "recorded" and arg for (name, _), arg in zip(parameters(op), args, strict=True)
    )


def reject(kernel: Kernel, args: Sequence, error: Exception) -> None:
    """Rejects a kernel for calls of this kind, with a warning: other kernels serve them."""
    reason = failure_text(error)
    if len(KNOWN.calls) >= MOST_KINDS:
        KNOWN.calls.clear()
    KNOWN.calls[kind_of_call(kernel, args)] = reason
    KNOWN.choices.clear()
    warn_of_failure(kernel.op, kernel.name, device_of(args), reason)


def left_out() -> list[str]:
    """Kernels that were rejected in this process, or disabled, in words."""
    lines = [
        f"kernel {name!r} of q2::{op} on {device} is {' '.join(reason.split())}"
        for (op, name, device), reason in KNOWN.warned.items()
    ]
    return lines + [
        f"kernel {name!r} is disabled by {who}" for name, who in disabled_kernels().items()
    ]


def kernel(op: str, name: str, **parts: Any) -> Callable[[Callable], Callable]:
    """Decorator: registers an implementation of an op, with the parts of a Kernel. A later
    registration is tried before an earlier one."""

    def register(function: Callable) -> Callable:
        add(Kernel(op, name, function=function, **parts))
        return function

    return register


def select(op: str, args: Sequence, name: str) -> Callable:
    """The function of a kernel of an op.

    Args:
        op: name of the op without its namespace.
        args: the op's positional arguments (tensors may be fake).
        name: the kernel's name.

    Raises:
        ValueError: there is no such kernel.
        NotServedError: it does not serve these arguments; the message says why.
    """
    found = kernel_named(op, name)
    reason = found.why_not(*args)
    if reason is not None:
        message = f"kernel {name!r} cannot run q2::{op} here: {reason}."
        raise NotServedError(message, state_of(reason))
    return found.function
