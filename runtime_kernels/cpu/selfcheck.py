# SPDX-License-Identifier: Apache-2.0
"""A small matrix through each CPU kernel, compared with the torch reference before its first use in
a process: the same bits, by scheme, transform and variant. It takes milliseconds, and is not kept.

A kernel that differs, or raises, is rejected with a KernelWarning; the reference serves instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.kernel_states import KNOWN, Result, lacks_memory
from q2compile.runtime_kernels.kernel_states import rejected as rejected_for
from q2compile.runtime_kernels.numerics.groups import padded_ends
from q2compile.runtime_kernels.numerics.layout import pack_bits
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import DEQUANTIZE, GEMM, QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import CPP, REFERENCE, failure_text, warn_of_failure

_CPU = torch.device("cpu")
_ROWS, _COLUMNS = 37, 152  # no multiple of 16, more lanes than a register has
_ENDS = (3, 20, 20, 31)  # of groups of rows

_LOCK = threading.RLock()


def rejected(call: QuantizerCall) -> str | None:
    """None when the kernel of such a call may be used, otherwise the reason in words."""
    source = call.args.get("source_scheme")
    amax = call.args.get("amax") is not None
    of = call.args["scheme"], call.args["transform"], source, amax, call.variant
    return _reason((call.spec.name, CPP, _CPU, *of), lambda: _small(call))


def rejected_of(op: str, what: str) -> str | None:
    """None when an op's kernel may be used with a scheme or transform, otherwise the reason."""
    return _reason((op, CPP, _CPU, what), lambda: _others(op, what))


def _reason(check: tuple, arguments: Callable[[], Sequence[Any]]) -> str | None:
    if (found := KNOWN.checks.get(check)) is not None:
        return found.reason
    op = check[0]
    missing = build.why_missing()
    if missing is not None:
        return f"there is no library of CPU kernels: {missing}"
    with _LOCK:
        if (found := KNOWN.checks.get(check)) is not None:
            return found.reason
        with _apart():
            try:
                given = arguments()
                want = _function(op, REFERENCE)(*given)
            except Exception as error:  # the call is wrong, and the reference says so
                return f"the reference raises {type(error).__name__}: {error}"
            try:
                reason = difference(_function(op, CPP)(*given), want)
                reason = reason and rejected_for(f"its self-check failed: {reason}")
            except Exception as error:
                if lacks_memory(error):
                    raise
                reason = failure_text(error)
        KNOWN.checks[check] = Result(reason)
    if reason is not None:
        warn_of_failure(op, CPP, _CPU, reason)
    return reason


def _function(op: str, name: str) -> Callable:
    return next(kernel.function for kernel in kernels(op) if kernel.name == name)


def difference(got: Any, want: Any) -> str | None:
    """How a kernel's results differ from the reference's, None when they have the same bits. Any
    NaN is as good as another."""
    if isinstance(want, torch.Tensor):
        got, want = [got], [want]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        wrong = different(a, b)
        if wrong:
            return f"{wrong} of {b.numel()} elements of output {index} differ from the reference"
    return None


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two tensors differ in their bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[b.element_size()]
    wrong = a.contiguous().view(width) != b.contiguous().view(width)
    if b.is_floating_point() and b.element_size() > 1:
        wrong &= ~(a.isnan() & b.isnan())
    return int(wrong.sum())


def _matrix(rows: int = _ROWS, columns: int = _COLUMNS) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    return torch.randn((rows, columns), generator=generator, dtype=torch.float32).bfloat16()


def _quantized(scheme: str, x: torch.Tensor) -> list[torch.Tensor]:
    call = rowwise_call(scheme, x)
    if call.scheme.stochastic:
        call = call.replace(rowwise_seed=torch.tensor(3))
    made: list[torch.Tensor] = _function(call.spec.name, REFERENCE)(*call.positional)
    return made


def _small(call: QuantizerCall) -> Sequence[Any]:
    """The arguments of such a call of a small matrix."""
    args: dict[str, Any] = {"recorded": False}
    x = _matrix()
    if call.source_scheme is None:
        args["x"] = x
        if call.args["amax"] is not None:
            args["amax"] = x.abs().amax().float()
    else:
        codes, scales, global_scale = _quantized(call.source_scheme.name, x)
        source = x if call.by_scales else codes
        args |= dict(
            zip(call.spec.source, (source, scales, global_scale), strict=True), rows=_COLUMNS
        )
    if call.grouped:
        offs = torch.tensor(_ENDS, dtype=torch.int32)
        args |= {"offs": offs, "padded_offs": padded_ends(offs)}
    for index, operand in enumerate(call.operands):
        if operand.seed is not None:
            args[operand.seed_name] = torch.tensor(0x123456789ABCDEF + index)
    return call.replace(**args).positional


def _others(op: str, what: str) -> Sequence[Any]:
    if op == DEQUANTIZE:
        return *_quantized(what, _matrix()), what, _COLUMNS, torch.bfloat16
    if op == GEMM:
        operands = *_quantized(what, _matrix()), *_quantized(what, _matrix(_ROWS + 1))
        dtype = torch.bfloat16 if get_scheme(what).has_pow2_scale else torch.float32
        return *operands, None, what, what, dtype
    grad = _matrix(_ROWS, 256)
    return grad, pack_bits(_matrix(_ROWS, 256).t()[None] > 0)[0].t().contiguous(), what


@contextmanager
def _apart() -> Iterator[None]:
    """A context without the caller's modes and settings."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_CPU)
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield
