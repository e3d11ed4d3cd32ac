# SPDX-License-Identifier: Apache-2.0
"""q2::quantize and q2::requantize in C++ (csrc/quantize.h): the bits of the references.

The kernel writes codes and plain scales. For a scheme with a form (@32x4x4, @bf16) they are then
swizzled or dequantized. Rows in groups are first copied into the padded layout, by the reference's
own function.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import cache
from typing import Any

import torch

from q2compile.runtime_kernels.cpu import kernels
from q2compile.runtime_kernels.cpu.dequantize import dequantized, plain_scales
from q2compile.runtime_kernels.numerics.column_sums import column_sums
from q2compile.runtime_kernels.numerics.groups import clear_tail, lay_out, spreads
from q2compile.runtime_kernels.numerics.layout import ceil_div, empty_quantized
from q2compile.runtime_kernels.numerics.mxfp4 import ABOVE_HALF
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.numerics.transforms import Transform
from q2compile.runtime_kernels.ops import quantize as op
from q2compile.runtime_kernels.ops import requantize as requantize_op
from q2compile.runtime_kernels.ops.table import QUANTIZE, REQUANTIZE, QuantizerCall

_ROUNDINGS = {("nvfp4", "rtn"): 0, ("nvfp4", "sr"): 1, ("nvfp4", "ms_eden"): 2}
_ROUNDINGS |= {("mxfp4", "rtn"): 3, ("mxfp4", "sr"): 4, ("mxfp4", "quest"): 5}
_SEARCH = 2


def _rounding_of(scheme: Scheme) -> int | None:
    """The number of the rule in csrc/rules.h; None if there is none."""
    return _ROUNDINGS.get((scheme.format, scheme.rounding))


# The calls that the references serve: the reason, and a test of the call.
UNSUPPORTED: dict[str, Callable[[QuantizerCall], bool]] = {
    "statistics are computed after the same call without them": lambda call: call.recorded,
    "rng_offset must fit into 32 bits": lambda call: not 0 <= call.args["rng_offset"] < 1 << 32,
    "PyTorch's own operations round to e4m3": lambda call: call.scheme.is_tensorwise,
    "a source has codes and scales": lambda call: (
        call.source_scheme is not None and call.source_scheme.dequantized
    ),
    "csrc/rules.h has no rule for this rounding": lambda call: (
        not call.scheme.is_tensorwise and _rounding_of(call.scheme) is None
    ),
}


def _why_not(call: QuantizerCall) -> str | None:
    """Why the kernels do not serve a call, else None."""
    return next((reason for reason, holds in UNSUPPORTED.items() if holds(call)), None)


@cache
def _operand(scheme: Scheme, transform: Transform, columnwise: bool) -> kernels.CpuOperand:
    """The fields that do not depend on tensors."""
    vmax, four = scheme.vmax, scheme.vmax / 1.5
    made = kernels.CpuOperand(
        source_height=1,
        columnwise=columnwise,
        rounding=_rounding_of(scheme),
        selection=_SEARCH if scheme.steps else int(scheme.selects),
        exact=scheme.global_scale == "exact",
        height=scheme.block[0],
        above=ABOVE_HALF if scheme.rceil else 0,
        chunk=max(scheme.width, transform.size),
        rotated=transform.size,
        signs=transform.signs != "none",
        vmax=vmax,
        vmax_four=four,
        inverse_vmax=1.0 / vmax,
        inverse_vmax_four=1.0 / four,
        cap=scheme.cap,
        amax_divisor=vmax * scheme.cap,
        shrink=scheme.shrink,
        global_scale_of_mx=1.0 / scheme.shrink,
        factor=transform.norm,
        step_count=len(scheme.steps),
    )
    made.steps[: len(scheme.steps)] = scheme.steps
    return made


class _Maker:
    """Makes operands of one source, with the rounding of one call."""

    def __init__(self, call: QuantizerCall) -> None:
        self.call = call
        self.asked = call.scheme
        self.scheme = self.asked.with_form("") if self.asked.form else self.asked

    def of_matrix(
        self, x: torch.Tensor, columnwise: bool, seed, transform: Transform, **more: Any
    ) -> list[torch.Tensor]:
        """Quantizes a matrix of any strides. more: fields of the operand."""
        operand = self._new(columnwise, transform)
        operand.type = kernels.TYPES[x.dtype]
        operand.row_stride, operand.column_stride = x.stride()
        rows, columns = x.shape
        return self._run(operand, x, rows, columns, seed, transform, more)

    def of_source(self, by_scales: bool, seed) -> list[torch.Tensor]:
        """Requantizes codes with scales, or a matrix by given scales."""
        x, scales, global_scale = (self.call.args[name] for name in self.call.spec.source)
        scheme, columns = self.call.source_scheme, self.call.args["rows"]
        assert scheme is not None
        transform = self.call.transform
        operand = self._new(True, transform)
        if by_scales:
            operand.type, operand.source = kernels.TYPES[x.dtype], kernels.BY_SCALES
            width = columns = x.shape[1]
        else:
            operand.source, width = kernels.CODES, 2 * x.shape[1]
        operand.row_stride, operand.column_stride = x.stride()
        scales = plain_scales(scales, x.shape[0], ceil_div(width, scheme.width), scheme)
        operand.source_scales, operand.scales_across = scales.data_ptr(), scales.shape[1]
        operand.source_is_mx, operand.source_height = scheme.format == "mxfp4", scheme.block[0]
        operand.source_global = global_scale.data_ptr()
        more = {"factor_tensor": global_scale.data_ptr()}
        return self._run(operand, x, x.shape[0], columns, seed, transform, more)

    def _new(self, columnwise: bool, transform: Transform) -> kernels.CpuOperand:
        fixed = _operand(self.scheme, transform, columnwise)
        operand: kernels.CpuOperand = kernels.CpuOperand.from_buffer_copy(fixed)
        operand.rng_offset = self.call.args["rng_offset"]
        return operand

    def _run(
        self,
        operand: kernels.CpuOperand,
        x: torch.Tensor,
        rows: int,
        columns: int,
        seed,
        transform: Transform,
        more: dict,
    ) -> list[torch.Tensor]:
        operand.x, operand.rows, operand.columns = x.data_ptr(), rows, columns
        size = (columns, rows) if operand.columnwise else (rows, columns)
        made = list(empty_quantized(x, *size, self.scheme, transform))
        operand.codes, operand.scales, operand.global_scale = (part.data_ptr() for part in made)
        if self.call.masked:
            made.append(x.new_empty((size[0], made[0].shape[1] // 4), dtype=torch.uint8))
            operand.mask = made[3].data_ptr()
        operand.seed = kernels.pointer(seed)
        operand.sign_seed = kernels.sign_seed(transform, seed)
        for name, value in more.items():
            setattr(operand, name, value)
        kernels.entry("q2_quantize")(byref(operand))
        return made

    def in_form(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Codes and scales in the form that was asked for."""
        codes, scales, global_scale, *mask = parts
        if self.asked.swizzled:
            scales = swizzle_32x4x4(scales).view(-1, 512)
        elif self.asked.dequantized:
            has_pow2_scale = self.scheme.has_pow2_scale
            width = 2 * codes.shape[1]
            codes = dequantized(
                codes, scales, global_scale if has_pow2_scale else None, self.scheme, width
            )
            scales = scales.new_empty((0, 0))
            global_scale = (
                torch.where(global_scale.isnan(), global_scale, 1.0)
                if has_pow2_scale
                else global_scale
            )
        return [codes, scales, global_scale, *mask]


@kernels.cpu_kernel(QUANTIZE, lambda *args: _why_not(QuantizerCall.of(QUANTIZE, args)))
def quantize(*args: Any) -> list[torch.Tensor]:
    """See ops/quantize.py."""
    call = op.checked_quantize(QuantizerCall.of(QUANTIZE, args))
    maker, made = _Maker(call), []
    amax = kernels.pointer(call.args["amax"])
    for columnwise, seed, _, transform in call.operands:
        if columnwise and call.grouped:
            made += _in_groups(maker, call.x, seed)
        else:
            how = columnwise, seed, transform
            made += maker.in_form(maker.of_matrix(call.x, *how, amax=amax))
    if call.dbias is not None:
        made.append(column_sums(call.x, call.dbias))
    return made


@kernels.cpu_kernel(REQUANTIZE, lambda *args: _why_not(QuantizerCall.of(REQUANTIZE, args)))
def requantize(*args: Any) -> list[torch.Tensor]:
    """See ops/requantize.py."""
    call = requantize_op.checked_requantize(QuantizerCall.of(REQUANTIZE, args))
    maker, seed = _Maker(call), call.args["columnwise_seed"]
    if not call.grouped:
        return maker.in_form(maker.of_source(call.by_scales, seed))
    codes, scales, global_scale = (call.args[name] for name in call.spec.source)
    scheme, columns = call.source_scheme, call.args["rows"]
    assert scheme is not None
    x = dequantized(codes, scales, None, scheme, columns, torch.float32)
    return _in_groups(maker, x, seed, factor_tensor=global_scale.data_ptr())


def _in_groups(maker: _Maker, x: torch.Tensor, seed, **more: Any) -> list[torch.Tensor]:
    """The operand x columnwise, its rows in the groups of a call."""
    ends = maker.call.args["offs"], maker.call.args["padded_offs"]
    transform = maker.call.transform
    laid, shares = lay_out(x, *ends, spread=spreads(maker.scheme, transform))
    parts = maker.of_matrix(laid, True, seed, transform, shares=kernels.pointer(shares), **more)
    codes, *rest = maker.in_form(parts)
    return [clear_tail(codes, ends[1]), *rest]
