# SPDX-License-Identifier: Apache-2.0
"""The rounding rules of `q2compile.runtime_kernels.numerics.nvfp4` in Inductor's IR.

    pow2    codes and pseudo-scales in one kernel; then q2::split_scales, which sees a sixteenth of
            the elements
    exact   the global scale from amax, then codes and scales in one kernel

A block's scale is held as a small int32: under pow2 the top bits of the pseudo-scale, 11 of them,
ordered as the values; under exact its e4m3 byte."""

from __future__ import annotations

from functools import partial

import torch
from torch._inductor.virtualized import ops

from q2compile.lowering import launches
from q2compile.lowering.inductor_kernels import fp32
from q2compile.lowering.inductor_kernels.blocks import Index, PerBlock, ReducedBlocks
from q2compile.lowering.inductor_kernels.fp32 import Fp32, Value, integer, number
from q2compile.lowering.inductor_kernels.rounding import (
    FourOverSix,
    Quantized,
    Rounding,
    Scales,
    ScaleSearch,
)
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, E4M3_MAX, Scheme

_NAN_BYTE, _NORMAL_BYTE = 0x7F, 8  # of e4m3
_NORMAL = 8  # the least top bits of a normal fp32
_NAN_TOP = 0x7FC  # the top bits of a NaN


class _Pow2:
    """p = largest / vmax to 4 significant bits."""

    def __init__(self, fp: Fp32, largest: PerBlock) -> None:
        self.fp, self.largest = fp, largest

    def code(self, place: Index, vmax: float) -> Value:
        largest = fp32.float_of(self.largest(place))
        return fp32.top_bits(self.fp.mul(largest, number(1.0 / vmax)))

    def ratio(self, four: Value, six: Value) -> Value:
        value = fp32.from_top_bits(self.normal_or_zero(four))
        return self.fp.mul(value, self.reciprocal(six))

    def stepped(self, code: Value, step: int) -> Value:
        stepped, least = ops.add(code, integer(step)), integer(_NORMAL)
        there = ops.logical_and(ops.ge(code, least), ops.ge(stepped, least))
        return ops.where(there, stepped, code)

    def reciprocal(self, code: Value) -> Value:
        normal = ops.maximum(code, integer(_NORMAL))
        return self.fp.reciprocal_of_4_bits(fp32.from_top_bits(normal))

    def within(self, scaled: Value) -> Value:
        return scaled  # p is at most 1/17 too small

    @staticmethod
    def normal_or_zero(top: Value) -> Value:
        return ops.where(ops.ge(top, integer(_NORMAL)), top, integer(0))


class _Exact:
    """s = e4m3(largest / vmax / g); global_scale and inverse load g and 1/g."""

    def __init__(
        self, fp: Fp32, largest: PerBlock, global_scale: PerBlock, inverse: PerBlock
    ) -> None:
        self.fp, self.largest, self.global_scale, self.inverse = fp, largest, global_scale, inverse

    def code(self, place: Index, vmax: float) -> Value:
        scale = self.fp.div(fp32.float_of(self.largest(place)), number(vmax))
        scale = ops.minimum(self.fp.div(scale, self.global_scale([])), number(E4M3_MAX))
        return fp32.e4m3_byte(scale)

    def ratio(self, four: Value, six: Value) -> Value:
        return self.fp.div(self._value(four), self._value(six))

    def stepped(self, code: Value, step: int) -> Value:
        stepped = ops.minimum(ops.add(code, integer(step)), integer(_NAN_BYTE - 1))
        least = integer(_NORMAL_BYTE if step < 0 else 1)
        there = ops.logical_and(ops.ge(code, least), ops.lt(code, integer(_NAN_BYTE - 1)))
        return ops.where(there, stepped, code)

    def reciprocal(self, code: Value) -> Value:
        quotient = self.fp.div(self.inverse([]), self._value(code))
        return ops.minimum(quotient, number(torch.finfo(torch.float32).max))

    def within(self, scaled: Value) -> Value:
        return ops.minimum(scaled, number(E2M1_MAX))

    @staticmethod
    def _value(code: Value) -> Value:
        return ops.where(ops.eq(code, integer(0)), number(1.0), fp32.e4m3_value(code))


def _rounding(blocks: ReducedBlocks, scheme: Scheme, scales: Scales) -> Rounding:
    if scheme.steps:
        return ScaleSearch(blocks, scheme, scales)
    return (FourOverSix if scheme.selects else Rounding)(blocks, scheme, scales)


def quantize_pow2(blocks: ReducedBlocks, scheme: Scheme) -> Quantized:
    """Codes, scales and a global scale that is a power of two."""
    largest = blocks.largest().make_loader()
    rounding = _rounding(blocks, scheme, _Pow2(blocks.fp, largest))
    codes = blocks.pack(rounding.code)

    def raw_scale(place: Index) -> Value:
        """The pseudo-scale; NaN for a poisoned block."""
        top = _Pow2.normal_or_zero(rounding.scale(place))
        top = ops.where(fp32.is_finite(largest(place)), top, integer(_NAN_TOP))
        return fp32.from_top_bits(top)

    raw_scales = blocks.per_block(torch.float32, raw_scale)
    return codes, *_split_scales(raw_scales, scheme.name)


_split_scales = partial(launches.launches_of, torch.ops.q2.split_scales.default)


def quantize_exact(blocks: ReducedBlocks, load_amax: PerBlock, scheme: Scheme) -> Quantized:
    """Codes, scales and the papers' global scale, from an amax that is loaded from []."""
    fp = blocks.fp

    def computed() -> Value:
        amax = load_amax([])
        g = fp.div(amax, number(scheme.vmax * scheme.cap))
        g = ops.where(ops.eq(g, number(0.0)), number(1.0), ops.maximum(g, number(fp32.TINY)))
        finite = fp32.is_finite(fp32.magnitude_bits(amax))
        return ops.where(finite, g, number(float("nan")))

    global_scale = blocks.scalar(torch.float32, computed)
    load_g = global_scale.make_loader()
    inverse = blocks.scalar(torch.float32, lambda: fp.div(number(1.0), load_g([])))
    largest = blocks.largest().make_loader()
    scales = _Exact(fp, largest, load_g, inverse.make_loader())
    rounding = _rounding(blocks, scheme, scales)

    def byte(place: Index) -> Value:
        """The block's scale; NaN for a poisoned block, or where the global scale is."""
        g = load_g([])
        finite = ops.logical_and(fp32.is_finite(largest(place)), ops.eq(g, g))
        code = ops.where(finite, rounding.scale(place), integer(_NAN_BYTE))
        return ops.to_dtype(code, torch.uint8)

    codes = blocks.pack(rounding.code)
    return codes, blocks.scales(byte, scheme), global_scale
