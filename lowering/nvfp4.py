"""The rounding rules of `q2compile.runtime_kernels.nvfp4`, in Inductor's loops.

    pow2    codes and pseudo-scales in one kernel; then q2::split_scales, which sees a sixteenth of
            the elements
    exact   the global scale from amax, then codes and scales in one kernel

A block's scale is held as a small int32: under pow2 the top bits of the pseudo-scale, 11 of them,
which order as the values do; under exact its e4m3 byte.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler
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
_NAN_TOP = 0x7FC  # the top bits of a NaN


class _Scales(Protocol):
    """How the blocks of one tensor are scaled."""

    fp: Fp32

    def code(self, place: Index, vmax: float) -> Value:
        """The scale that maps the block's largest to vmax, as an int32."""

    def value(self, code: Value) -> Value:
        """The scale as fp32."""

    def reciprocal(self, code: Value) -> Value:
        """What x is multiplied by under a scale."""

    def within(self, scaled: Value) -> Value:
        """A scaled magnitude below 7, without a change of what it rounds to."""


class _Pow2:
    """p = largest / vmax to 4 significant bits."""

    def __init__(self, fp: Fp32, largest: PerBlock) -> None:
        self.fp, self.largest = fp, largest

    def code(self, place: Index, vmax: float) -> Value:
        largest = fp32.float_of(self.largest(place))
        return fp32.top_bits(self.fp.mul(largest, number(1.0 / vmax)))

    def value(self, code: Value) -> Value:
        return fp32.from_top_bits(self.normal_or_zero(code))

    def reciprocal(self, code: Value) -> Value:
        normal = ops.maximum(code, integer(_NORMAL))
        return self.fp.reciprocal_of_4_bits(fp32.from_top_bits(normal))

    def within(self, scaled: Value) -> Value:
        return scaled  # p is at most 1/17 too small

    @staticmethod
    def normal_or_zero(top: Value) -> Value:
        return ops.where(ops.ge(top, integer(_NORMAL)), top, integer(0))


class _Exact:
    """s = e4m3(largest / vmax / g); unit and inverse load g and 1/g."""

    def __init__(self, fp: Fp32, largest: PerBlock, unit: PerBlock, inverse: PerBlock) -> None:
        self.fp, self.largest, self.unit, self.inverse = fp, largest, unit, inverse

    def code(self, place: Index, vmax: float) -> Value:
        scale = self.fp.div(fp32.float_of(self.largest(place)), number(vmax))
        scale = ops.minimum(self.fp.div(scale, self.unit([])), number(E4M3_MAX))
        return fp32.e4m3_byte(scale)

    def value(self, code: Value) -> Value:
        return ops.where(ops.eq(code, integer(0)), number(1.0), fp32.e4m3_value(code))

    def reciprocal(self, code: Value) -> Value:
        quotient = self.fp.div(self.inverse([]), self.value(code))
        return ops.minimum(quotient, number(torch.finfo(torch.float32).max))

    def within(self, scaled: Value) -> Value:
        return ops.minimum(scaled, number(E2M1_MAX))


class _Rounding:
    """Codes of the elements and scales of the blocks: RTN, or 4/6.

    What a block knows of itself is a buffer of its own. They all end up in registers of one kernel;
    but as expressions inside each other they were most of the compile time.
    """

    def __init__(self, blocks: Blocks, scheme: Scheme, scales: _Scales) -> None:
        self.blocks, self.scheme, self.scales, self.fp = blocks, scheme, scales, scales.fp
        candidates = [scheme.vmax, scheme.vmax / 1.5] if scheme.select else [scheme.vmax]
        self._codes = [blocks.kept(torch.int32, partial(scales.code, vmax=v)) for v in candidates]
        self._reciprocals = [
            blocks.kept(torch.float32, partial(self._reciprocal, code)) for code in self._codes
        ]
        if scheme.select:
            errors = [
                blocks.over_blocks("sum", partial(self._error, reciprocal))
                for reciprocal in self._reciprocals
            ]
            self._four = blocks.kept(torch.bool, lambda place: self._takes_four(place, *errors))

    def code(self, x: Value, place: Index) -> Value:
        """The e2m1 code of x."""
        (scaled, magnitude), *other = (self._rounded(x, r(place)) for r in self._reciprocals)
        if other:
            four = self._four(place)
            scaled = ops.where(four, other[0][0], scaled)
            magnitude = ops.where(four, other[0][1], magnitude)
        return self.fp.e2m1_code(scaled, magnitude, x)

    def scale(self, place: Index) -> Value:
        """The scale that the block takes, as an int32."""
        code, *other = (code(place) for code in self._codes)
        return ops.where(self._four(place), other[0], code) if other else code

    def _rounded(self, x: Value, reciprocal: Value) -> tuple[Value, Value]:
        scaled = self.fp.mul(ops.abs(x), reciprocal)
        return scaled, fp32.round_e2m1(self.scales.within(scaled))

    def _reciprocal(self, code: PerBlock, place: Index) -> Value:
        return self.scales.reciprocal(code(place))

    def _error(self, reciprocal: PerBlock, x: Value, place: Index) -> Value:
        """The error of x in units of the scale, in fixed point: the bits of an fp32 in [128, 256).
        A block's sum of them wraps around, and is right again when its offset is taken off."""
        error = ops.sub(*self._rounded(x, reciprocal(place)))
        error = self.fp.mul(error, error) if self.scheme.select == "mse" else ops.abs(error)
        return fp32.bits_of(ops.add(error, number(ERROR_OFFSET)))

    def _takes_four(self, place: Index, *errors: PerBlock) -> Value:
        """`nvfp4._four_over_six`: whether the scale for vmax / 1.5 leaves the smaller error."""
        offset = _ERROR_OFFSET_BITS * self.blocks.height * self.blocks.width % 2**32
        offset -= offset >> 31 << 32  # as an int32
        six, four = (
            ops.to_dtype(ops.sub(error(place), integer(offset)), torch.float32) for error in errors
        )
        scale = self.scales.value(self._codes[1](place))
        if self.scheme.global_scale == "pow2":
            ratio = self.fp.mul(scale, self._reciprocals[0](place))
        else:
            ratio = self.fp.div(scale, self.scales.value(self._codes[0](place)))
        ratio = self.fp.mul(ratio, ratio) if self.scheme.select == "mse" else ratio
        return ops.lt(self.fp.mul(four, ratio), six)


def quantize_pow2(x: ir.TensorBox, scheme: Scheme) -> Quantized:
    """x [M, K] -> codes, scales and a global scale that is a power of two."""
    blocks = Blocks(x, scheme.block)
    largest = blocks.largest()
    rounding = _Rounding(blocks, scheme, _Pow2(Fp32(blocks.device), largest))
    codes = blocks.pack(rounding.code)

    def worth(place: Index) -> Value:
        """The pseudo-scale; NaN for a block that is not finite."""
        finite = ops.lt(largest(place), integer(fp32.INFINITE))
        top = _Pow2.normal_or_zero(rounding.scale(place))
        return fp32.from_top_bits(ops.where(finite, top, integer(_NAN_TOP)))

    worths = blocks.per_block(torch.float32, worth)
    worths.realize()
    return codes, *_split_scales(worths, scheme.name)


_split_scales = fallback_handler(torch.ops.q2.split_scales.default, add_to_fallback_set=False)


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
        unit = load_unit([])
        code = ops.where(ops.eq(unit, unit), rounding.scale(place), integer(_NAN_BYTE))
        return ops.to_dtype(code, torch.uint8)

    codes = blocks.pack(rounding.code)
    bytes_ = reinterpreted(blocks.per_block(torch.uint8, byte), torch.float8_e4m3fn)
    return codes, bytes_, unit
