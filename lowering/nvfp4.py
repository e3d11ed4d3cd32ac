"""The rounding rules of `q2compile.runtime_kernels.nvfp4`, in Inductor's loops.

    pow2    codes and pseudo-scales in one kernel, then the largest pseudo-scale, then the scales;
            the last two see a sixteenth of the elements
    exact   the global scale from amax, then codes and scales in one kernel

A block's scale is held as a small int32: under pow2 the top bits of the pseudo-scale, 11 of them,
which order as the values do; under exact its e4m3 byte.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops

from q2compile.lowering import fp32
from q2compile.lowering.blocks import Blocks, Index, PerBlock, reinterpreted
from q2compile.lowering.fp32 import Fp32, Value, integer, number
from q2compile.runtime_kernels.nvfp4 import ERROR_OFFSET
from q2compile.runtime_kernels.schemes import E2M1_MAX, E4M3_MAX, Scheme

Quantized = tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox]
_ERROR_OFFSET_BITS = 0x43000000  # of the fp32 128
_NAN_BYTE = 0x7F  # of e4m3
_NORMAL = 8  # the least top bits of a normal fp32
_INFINITE = fp32.INFINITE >> 20  # top bits of what is not finite


class _Scales(Protocol):
    """How the blocks of one tensor are scaled."""

    fp: Fp32

    def code(self, place: Index, vmax: float) -> Value:
        """The scale that maps the block's largest to vmax, as an int32."""

    def reciprocal(self, place: Index, vmax: float) -> Value:
        """What x is multiplied by under that scale."""

    def ratio(self, place: Index, vmax: float, other: float) -> Value:
        """The scale for vmax over that for other."""

    def saturated(self, magnitude: Value) -> Value:
        """A rounded magnitude within e2m1's range."""


class _Pow2:
    """p = largest / vmax to 4 significant bits."""

    def __init__(self, fp: Fp32, largest: PerBlock) -> None:
        self.fp, self.largest = fp, largest

    def code(self, place: Index, vmax: float) -> Value:
        largest = fp32.float_of(self.largest(place))
        return fp32.top_bits(self.fp.mul(largest, number(1.0 / vmax)))

    def reciprocal(self, place: Index, vmax: float) -> Value:
        normal = ops.maximum(self.code(place, vmax), integer(_NORMAL))
        return self.fp.reciprocal_of_4_bits(fp32.from_top_bits(normal))

    def ratio(self, place: Index, vmax: float, other: float) -> Value:
        scale = fp32.from_top_bits(self._normal_or_zero(self.code(place, vmax)))
        return self.fp.mul(scale, self.reciprocal(place, other))

    def saturated(self, magnitude: Value) -> Value:
        return magnitude  # p is at most 1/17 too small: what exceeds 6 by that rounds to 6

    @staticmethod
    def _normal_or_zero(top: Value) -> Value:
        return ops.where(ops.ge(top, integer(_NORMAL)), top, integer(0))

    def pseudo(self, place: Index, code: Value) -> Value:
        """The top bits to keep: 0 for a subnormal scale, Inf for a block that is not finite."""
        bad = ops.ge(self.largest(place), integer(fp32.INFINITE))
        return ops.where(bad, integer(_INFINITE), self._normal_or_zero(code))


class _Exact:
    """s = e4m3(largest / vmax / g); unit and inverse load g and 1/g."""

    def __init__(self, fp: Fp32, largest: PerBlock, unit: PerBlock, inverse: PerBlock) -> None:
        self.fp, self.largest, self.unit, self.inverse = fp, largest, unit, inverse

    def code(self, place: Index, vmax: float) -> Value:
        scale = self.fp.div(fp32.float_of(self.largest(place)), number(vmax))
        scale = ops.minimum(self.fp.div(scale, self.unit([])), number(E4M3_MAX))
        return fp32.e4m3_byte(scale)

    def _or_one(self, place: Index, vmax: float) -> Value:
        code = self.code(place, vmax)
        return ops.where(ops.eq(code, integer(0)), number(1.0), fp32.e4m3_value(code))

    def reciprocal(self, place: Index, vmax: float) -> Value:
        quotient = self.fp.div(self.inverse([]), self._or_one(place, vmax))
        return ops.minimum(quotient, number(torch.finfo(torch.float32).max))

    def ratio(self, place: Index, vmax: float, other: float) -> Value:
        return self.fp.div(self._or_one(place, vmax), self._or_one(place, other))

    def saturated(self, magnitude: Value) -> Value:
        return ops.minimum(magnitude, number(E2M1_MAX))

    def byte(self, code: Value) -> Value:
        """The e4m3 byte to keep: NaN under a global scale that is NaN."""
        unit = self.unit([])
        return ops.where(ops.eq(unit, unit), code, integer(_NAN_BYTE))


class _Rounding:
    """Codes of the elements under the scales of their blocks: RTN, or 4/6."""

    def __init__(self, blocks: Blocks, scheme: Scheme, scales: _Scales) -> None:
        self.scheme, self.scales, self.fp = scheme, scales, scales.fp
        self.six, self.four = scheme.vmax, scheme.vmax / 1.5
        self._errors: list[PerBlock] = []
        if scheme.select:
            self._errors = [
                blocks.over_blocks("sum", lambda x, place, v=v: self._error(x, place, v))
                for v in (self.six, self.four)
            ]
        offset = _ERROR_OFFSET_BITS * blocks.height * blocks.width % 2**32
        self._offset = offset - (offset >> 31 << 32)  # as an int32

    def code(self, x: Value, place: Index) -> Value:
        """The e2m1 code of x."""
        magnitude = self._rounded(x, place, self.six)[1]
        if self._errors:
            other = self._rounded(x, place, self.four)[1]
            magnitude = ops.where(self._takes_four(place), other, magnitude)
        return fp32.e2m1_code(self.scales.saturated(magnitude), x)

    def scale(self, place: Index) -> Value:
        """The scale that the block takes, as an int32."""
        code = self.scales.code(place, self.six)
        if not self._errors:
            return code
        return ops.where(self._takes_four(place), self.scales.code(place, self.four), code)

    def _rounded(self, x: Value, place: Index, vmax: float) -> tuple[Value, Value]:
        scaled = self.fp.mul(ops.abs(x), self.scales.reciprocal(place, vmax))
        return scaled, fp32.round_e2m1(scaled)

    def _error(self, x: Value, place: Index, vmax: float) -> Value:
        """The error of x in units of the scale, in fixed point: the bits of an fp32 in [128, 256).
        A block's sum of them wraps around, and is right again when its offset is taken off."""
        scaled, magnitude = self._rounded(x, place, vmax)
        error = ops.sub(scaled, self.scales.saturated(magnitude))
        error = self.fp.mul(error, error) if self.scheme.select == "mse" else ops.abs(error)
        return fp32.bits_of(ops.add(error, number(ERROR_OFFSET)))

    def _takes_four(self, place: Index) -> Value:
        """`nvfp4._four_over_six`: whether the scale for vmax / 1.5 leaves the smaller error."""
        six, four = (
            ops.to_dtype(ops.sub(error(place), integer(self._offset)), torch.float32)
            for error in self._errors
        )
        ratio = self.scales.ratio(place, self.four, self.six)
        ratio = self.fp.mul(ratio, ratio) if self.scheme.select == "mse" else ratio
        return ops.lt(self.fp.mul(four, ratio), six)


def quantize_pow2(x: ir.TensorBox, scheme: Scheme) -> Quantized:
    """x [M, K] -> codes, scales and a global scale that is a power of two."""
    blocks = Blocks(x, scheme.block)
    scales = _Pow2(Fp32(blocks.device), blocks.largest())
    rounding = _Rounding(blocks, scheme, scales)
    codes = blocks.pack(rounding.code)

    def pseudo(place: Index) -> Value:
        return ops.to_dtype(scales.pseudo(place, rounding.scale(place)), torch.int16)

    tops = blocks.per_block(torch.int16, pseudo)
    tops.realize()
    return codes, *_split(blocks, tops, scheme.cap)


def _split(blocks: Blocks, tops: ir.TensorBox, cap: float) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Pseudo-scales, as int16 top bits -> e4m3 scales and the global scale 2^k, with the smallest k
    for which the largest of p / 2^k is at most cap: `nvfp4.pow2_global_scale`."""
    largest = lowerings[torch.ops.aten.amax.default](tops)
    largest.realize()
    load, load_largest = tops.make_loader(), largest.make_loader()
    mantissa, exponent = math.frexp(cap)  # cap = mantissa * 2^exponent, mantissa in [1/2, 1)
    cap_eighths = int(16 * mantissa) - 8  # its 3 bits after the leading one

    def power() -> tuple[Value, Value]:
        top = ops.to_dtype(load_largest([]), torch.int32)
        beyond = ops.gt(ops.bitwise_and(top, integer(7)), integer(cap_eighths))
        k = ops.sub(fp32.shifted_right(top, 3), integer(126 + exponent))
        k = ops.add(k, ops.to_dtype(beyond, torch.int32))
        return top, ops.where(ops.eq(top, integer(0)), integer(0), ops.maximum(k, integer(-126)))

    def power_of_two(k: Value) -> Value:
        return fp32.float_of(fp32.shifted_left(ops.add(k, integer(127)), 23))

    def global_scale() -> Value:
        top, k = power()
        poisoned = ops.ge(top, integer(_INFINITE))
        return ops.where(poisoned, number(float("nan")), power_of_two(k))

    def scale(place: Index) -> Value:
        top, k = power()
        p = fp32.from_top_bits(ops.to_dtype(load(place), torch.int32))
        byte = fp32.e4m3_byte(ops.mul(p, power_of_two(ops.neg(k))))
        poisoned = ops.ge(top, integer(_INFINITE))
        return ops.to_dtype(ops.where(poisoned, integer(_NAN_BYTE), byte), torch.uint8)

    scales = reinterpreted(blocks.per_block(torch.uint8, scale), torch.float8_e4m3fn)
    return scales, blocks.scalar(torch.float32, global_scale)


def quantize_exact(x: ir.TensorBox, amax: ir.TensorBox, scheme: Scheme) -> Quantized:
    """x [M, K] and its amax -> codes, scales and the papers' global scale."""
    blocks = Blocks(x, scheme.block)
    fp = Fp32(blocks.device)
    load_amax = amax.make_loader()

    def global_scale() -> Value:
        amax = load_amax([])
        unit = fp.div(amax, number(scheme.vmax * scheme.cap))
        unit = ops.where(
            ops.eq(unit, number(0.0)), number(1.0), ops.maximum(unit, number(fp32.TINY))
        )
        finite = ops.lt(fp32.magnitude_bits(amax), integer(fp32.INFINITE))
        return ops.where(finite, unit, number(float("nan")))

    unit = blocks.scalar(torch.float32, global_scale)
    load_unit = unit.make_loader()
    inverse = blocks.scalar(torch.float32, lambda: fp.div(number(1.0), load_unit([])))
    scales = _Exact(fp, blocks.largest(), load_unit, inverse.make_loader())
    rounding = _Rounding(blocks, scheme, scales)

    def byte(place: Index) -> Value:
        return ops.to_dtype(scales.byte(rounding.scale(place)), torch.uint8)

    codes = blocks.pack(rounding.code)
    bytes_ = reinterpreted(blocks.per_block(torch.uint8, byte), torch.float8_e4m3fn)
    return codes, bytes_, unit
