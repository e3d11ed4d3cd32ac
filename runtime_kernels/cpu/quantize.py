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
from q2compile.runtime_kernels.cpu.dequantize import dequantized
from q2compile.runtime_kernels.numerics.column_sums import column_sums
from q2compile.runtime_kernels.numerics.groups import clear_tail, lay_out, spreads
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.mxfp4 import ABOVE_HALF
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import plain_scales, swizzle_32x4x4
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


def _quantized(
    call: QuantizerCall,
    x: torch.Tensor,
    columnwise: bool,
    seed: torch.Tensor | None,
    transform: Transform,
    **more: Any,
) -> list[torch.Tensor]:
    """One operand of a call, from a matrix of any strides. more: fields of the struct."""
    asked = call.scheme
    scheme = asked.with_form("") if asked.form else asked
    operand: kernels.CpuOperand = kernels.CpuOperand.from_buffer_copy(
        _operand(scheme, transform, columnwise)
    )
    operand.rng_offset = call.args["rng_offset"]
    x = x if x.dtype in kernels.TYPES else x.float()
    rows, columns = x.shape
    operand.x, operand.type = x.data_ptr(), kernels.TYPES[x.dtype]
    operand.rows, operand.columns = rows, columns
    operand.row_stride, operand.column_stride = x.stride()
    size = (columns, rows) if columnwise else (rows, columns)
    made = list(empty_quantized(x, *size, scheme, transform))
    operand.codes, operand.scales, operand.global_scale = (part.data_ptr() for part in made)
    if call.masked:
        made.append(x.new_empty((size[0], made[0].shape[1] // 4), dtype=torch.uint8))
        operand.mask = made[3].data_ptr()
    operand.seed = kernels.pointer(seed)
    operand.sign_seed = kernels.sign_seed(transform, seed)
    for name, value in more.items():
        setattr(operand, name, value)
    kernels.entry("q2_quantize")(byref(operand))
    return _in_form(asked, scheme, *made)


def _in_form(
    asked: Scheme,
    scheme: Scheme,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    *mask: torch.Tensor,
) -> list[torch.Tensor]:
    """Codes and scales in the form that was asked for."""
    if asked.swizzled:
        scales = swizzle_32x4x4(scales).view(-1, 512)
    elif asked.dequantized:
        factor = global_scale if scheme.has_pow2_scale else None
        codes = dequantized(codes, scales, factor, scheme, 2 * codes.shape[1])
        scales = scales.new_empty((0, 0))
        if factor is not None:
            global_scale = torch.where(factor.isnan(), factor, 1.0)
    return [codes, scales, global_scale, *mask]


@kernels.cpu_kernel(QUANTIZE, lambda *args: _why_not(QuantizerCall.of(QUANTIZE, args)))
def quantize(*args: Any) -> list[torch.Tensor]:
    """See ops/quantize.py."""
    call = op.checked_quantize(QuantizerCall.of(QUANTIZE, args))
    made, amax = [], kernels.pointer(call.args["amax"])
    for columnwise, seed, _, transform in call.operands:
        if columnwise and call.grouped:
            made += _in_groups(call, call.x, seed)
        else:
            made += _quantized(call, call.x, columnwise, seed, transform, amax=amax)
    if call.dbias is not None:
        made.append(column_sums(call.x, call.dbias))
    return made


@kernels.cpu_kernel(REQUANTIZE, lambda *args: _why_not(QuantizerCall.of(REQUANTIZE, args)))
def requantize(*args: Any) -> list[torch.Tensor]:
    """See ops/requantize.py."""
    call = requantize_op.checked_requantize(QuantizerCall.of(REQUANTIZE, args))
    seed = call.args["columnwise_seed"]
    x, scales, global_scale = (call.args[name] for name in call.spec.source)
    scheme, more = call.source_scheme, {"factor_tensor": global_scale.data_ptr()}
    assert scheme is not None
    if call.by_scales:
        scales = plain_scales(scales, x.shape[0], x.shape[1], scheme).contiguous()
        more |= {"source_scales": scales.data_ptr(), "scales_across": scales.shape[1]}
    else:
        x = dequantized(x, scales, None, scheme, call.args["rows"], torch.float32)
    if call.grouped:
        return _in_groups(call, x, seed, **more)
    return _quantized(call, x, True, seed, call.transform, **more)


def _in_groups(
    call: QuantizerCall, x: torch.Tensor, seed: torch.Tensor | None, **more: Any
) -> list[torch.Tensor]:
    """The operand x columnwise, its rows in the groups of a call."""
    ends, transform = (call.args["offs"], call.args["padded_offs"]), call.transform
    laid, shares = lay_out(x, *ends, spread=spreads(call.scheme, transform))
    more["shares"] = kernels.pointer(shares)
    codes, *rest = _quantized(call, laid, True, seed, transform, **more)
    return [clear_tail(codes, ends[1]), *rest]
