# SPDX-License-Identifier: Apache-2.0
"""Inductor kernels of scheme fp8 (runtime_kernels/numerics/fp8.py): its quantizer, whose two
operands come from one read of x, and the dequantized and the transposed matrix.

All are pointwise, so Inductor fuses them with what produces x, and chooses tiles that read and
write whole lines rowwise and columnwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V, ops

from q2compile.lowering import launches
from q2compile.lowering.inductor_kernels.fp32 import (
    Value,
    bits_of,
    float_of,
    integer,
    is_finite,
    magnitude_bits,
    number,
)
from q2compile.lowering.member import OpCall
from q2compile.runtime_kernels.numerics.fp8 import EIGHT, EXPONENT, LEAST, QUARTER
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall

Box = Any  # ir.TensorBox
_CODES = torch.float8_e4m3fn


def quantize(call: QuantizerCall) -> tuple[Box, ...]:
    """The outputs of a call with an amax."""
    x, load_amax = call.x, call.args["amax"].make_loader()
    scale = _pointwise(x, torch.float32, [], lambda _: _pow2_of_amax(load_amax([])))
    scale.realize()
    load_scale = scale.make_loader()
    inverse = _pointwise(x, torch.float32, [], lambda _: ops.truediv(number(1.0), load_scale([])))
    inverse.realize()
    load_inverse, load = inverse.make_loader(), x.make_loader()

    def code(place: Any) -> Value:
        value = ops.to_dtype(load(place), torch.float32)
        # Not above 448, by the choice of the scale. A conversion of Inf would saturate.
        rounded = ops.mul(value, load_inverse([]))
        nan = number(float("nan"))
        return ops.to_dtype(ops.where(is_finite(magnitude_bits(value)), rounded, nan), _CODES)

    made: list[Box] = []
    for operand in call.operands:
        codes = _laid_out(x, _CODES, code, x.get_size(), call.scheme.width, operand.columnwise)
        made += [codes, _no_scales(x), scale]
    return tuple(made)


def dequantize(call: OpCall) -> Box:
    """q2::dequantize of fp8, to be fused with its readers."""
    codes, _, scale, _, columns, dtype = call.bound
    load, load_scale = codes.make_loader(), None if scale is None else scale.make_loader()

    def value(place: Any) -> Value:
        found = ops.to_dtype(load(place), torch.float32)
        if load_scale is not None:
            found = ops.mul(found, load_scale([]))
        return ops.to_dtype(found, dtype)

    return _pointwise(codes, dtype, [codes.get_size()[0], columns], value)


def transpose(call: OpCall) -> tuple[Box, Box]:
    """q2::transpose of fp8."""
    codes, _, scheme, rows, _ = call.bound
    size, width = [codes.get_size()[0], rows], get_scheme(scheme).width
    made = _laid_out(codes, _CODES, codes.make_loader(), size, width, columnwise=True)
    return made, _no_scales(codes)


def _laid_out(
    like: Box, dtype: torch.dtype, fn: Callable, size: Any, unit: int, columnwise: bool
) -> Box:
    """fn over [rows, columns], or its transpose, with the last dimension padded by zeros to whole
    units; a buffer of its own."""
    rows, contraction = reversed(size) if columnwise else size
    width = ceil_div(contraction, unit) * unit
    whole = V.graph.sizevars.statically_known_multiple_of(contraction, unit)

    def inner(place: Any) -> Value:
        row, column = place
        at = [column, row] if columnwise else [row, column]
        if whole:
            return fn(at)
        inside = ops.lt(
            ops.index_expr(column, torch.int64), ops.index_expr(contraction, torch.int64)
        )
        value = ops.masked(inside, lambda: ops.to_dtype(fn(at), torch.float32), 0.0)
        return ops.to_dtype(value, dtype)

    # Inductor's mark for contiguous rows: wide buffers could otherwise get padded rows.
    V.current_node.meta["dislike_padding"] = True
    box = _pointwise(like, dtype, [rows, width], inner)
    box.realize()
    box.freeze_layout()  # Inductor would otherwise lay a transposed copy out as its source
    return box


def _pointwise(like: Box, dtype: torch.dtype, ranges: list, inner: Callable) -> Box:
    device = like.get_device_or_error()
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=ranges)


def _no_scales(like: Box) -> Box:
    with V.graph.fake_mode:
        empty = torch.empty((0, 0), dtype=_CODES, device=like.get_device_or_error())
    return launches.without_elements(empty)


def _pow2_of_amax(amax: Value) -> Value:
    """`fp8.pow2_of_amax`."""
    bits = ops.bitwise_and(ops.add(bits_of(amax), integer(QUARTER)), integer(EXPONENT))
    power = float_of(ops.maximum(ops.sub(bits, integer(EIGHT)), integer(LEAST)))
    power = ops.where(ops.eq(amax, number(0.0)), number(1.0), power)
    return ops.where(is_finite(magnitude_bits(amax)), power, number(float("nan")))
