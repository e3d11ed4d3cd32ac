# SPDX-License-Identifier: Apache-2.0
"""Inductor kernels of scheme fp8 (runtime_kernels/numerics/fp8.py): its quantizer of rows, and the
dequantized matrix. Both are pointwise, so Inductor fuses them with what produces x.
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
from q2compile.runtime_kernels.ops.table import QuantizerCall

Box = Any  # ir.TensorBox
_CODES = torch.float8_e4m3fn


def quantize(call: QuantizerCall) -> tuple[Box, ...]:
    """The outputs of a rowwise call with an amax."""
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

    return _in_whole_units(x, code, call.scheme.width), _no_scales(x), scale


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


def _in_whole_units(like: Box, fn: Callable, unit: int) -> Box:
    """fn over the matrix, its rows padded by zeros to whole units; a buffer of its own."""
    rows, columns = like.get_size()
    whole = V.graph.sizevars.statically_known_multiple_of(columns, unit)

    def inner(place: Any) -> Value:
        if whole:
            return fn(place)
        inside = ops.lt(ops.index_expr(place[1], torch.int64), ops.index_expr(columns, torch.int64))
        value = ops.masked(inside, lambda: ops.to_dtype(fn(place), torch.float32), 0.0)
        return ops.to_dtype(value, _CODES)

    # Inductor's mark for contiguous rows: wide buffers could otherwise get padded rows.
    V.current_node.meta["dislike_padding"] = True
    box = _pointwise(like, _CODES, [rows, ceil_div(columns, unit) * unit], inner)
    box.realize()
    box.freeze_layout()
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
