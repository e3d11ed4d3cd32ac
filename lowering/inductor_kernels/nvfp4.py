# SPDX-License-Identifier: Apache-2.0
"""The rounding rules of `q2compile.runtime_kernels.numerics.nvfp4` in Inductor's IR.

    pow2    codes and pseudo-scales in one kernel; then q2::split_scales, which sees a sixteenth of
            the elements
    exact   the global scale from amax, then codes and scales in one kernel

A block's scale is held as a small int32: under pow2 the top bits of the pseudo-scale, 11 of them,
ordered as the values; under exact its e4m3 byte."""

from __future__ import annotations

from functools import partial

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from q2compile.lowering import launches
from q2compile.lowering.inductor_kernels import fp32, packed
from q2compile.lowering.inductor_kernels.blocks import Index, PerBlock, ReducedBlocks
from q2compile.lowering.inductor_kernels.fp32 import Fp32, Value, integer, number
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, E4M3_MAX, Scheme

Quantized = tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox]
_ERROR_OFFSET = 512.0  # the last bit of an fp32 in [512, 1024) weighs 2^-14
_ERROR_OFFSET_BITS = 0x44000000  # of that fp32
_NAN_BYTE, _NORMAL_BYTE = 0x7F, 8  # of e4m3
_NORMAL = 8  # the least top bits of a normal fp32
_NAN_TOP = 0x7FC  # the top bits of a NaN


class _Pow2:
    """p = largest / vmax to 4 significant bits."""

    def __init__(self, fp: Fp32, largest: PerBlock) -> None:
        self.fp, self.largest = fp, largest

    def code(self, place: Index, vmax: float) -> Value:
        """The scale that maps the block's largest to vmax, as an int32."""
        largest = fp32.float_of(self.largest(place))
        return fp32.top_bits(self.fp.mul(largest, number(1.0 / vmax)))

    def ratio(self, four: Value, six: Value) -> Value:
        """The quotient of two scales."""
        value = fp32.from_top_bits(self.normal_or_zero(four))
        return self.fp.mul(value, self.reciprocal(six))

    def stepped(self, code: Value, step: int) -> Value:
        """The scale so many e4m3 steps up: `nvfp4._stepped`."""
        stepped, least = ops.add(code, integer(step)), integer(_NORMAL)
        there = ops.logical_and(ops.ge(code, least), ops.ge(stepped, least))
        return ops.where(there, stepped, code)

    def reciprocal(self, code: Value) -> Value:
        """The factor that x is multiplied by under a scale."""
        normal = ops.maximum(code, integer(_NORMAL))
        return self.fp.reciprocal_of_4_bits(fp32.from_top_bits(normal))

    def within(self, scaled: Value) -> Value:
        """A scaled magnitude below 7, without a change of what it rounds to."""
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


class Rounding:
    """Codes of elements and scales of blocks, to nearest.

    Each per-block value is a buffer of its own. All end up in registers of one kernel. As nested
    expressions they took most of the compile time."""

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: _Pow2 | _Exact) -> None:
        self.blocks, self.scheme, self.scales, self.fp = blocks, scheme, scales, scales.fp
        self._code, self._reciprocal = self._candidate(scheme.vmax)

    def code(self, x: Value, place: Index, column: sympy.Expr) -> Value:
        """The e2m1 code of x."""
        if self.fp.converts_e2m1:
            return packed.codes(x, self._chosen_reciprocal(place), column)
        return self.fp.e2m1_code(self._nearest(x, place), x)

    def scale(self, place: Index) -> Value:
        """The scale that the block takes, as an int32."""
        return self._code(place)

    def _chosen_reciprocal(self, place: Index) -> Value:
        """The factor of a block's elements under the scale that it takes."""
        return self._reciprocal(place)

    def _nearest(self, x: Value, place: Index) -> Value:
        """|x| rounded, in units of the scale that its block takes."""
        return self._rounded(x, self._reciprocal(place))[1]

    def _candidate(self, vmax: float) -> tuple[PerBlock, PerBlock]:
        """The scale that maps a block's largest to vmax, and its reciprocal."""
        code = self.blocks.computed_once(torch.int32, partial(self.scales.code, vmax=vmax))
        return code, self._reciprocal_of(code)

    def _reciprocal_of(self, code: PerBlock) -> PerBlock:
        """The factor of a block's elements under a scale."""
        return self.blocks.computed_once(
            torch.float32, lambda place: self.scales.reciprocal(code(place))
        )

    def _rounded(self, x: Value, reciprocal: Value) -> tuple[Value, Value]:
        """|x| in units of its scale, and what that rounds to."""
        scaled = self._scaled(x, reciprocal)
        return scaled, fp32.round_e2m1(self.scales.within(scaled))

    def _scaled(self, x: Value, reciprocal: Value) -> Value:
        return self.fp.mul(ops.abs(x), reciprocal)


class _Compared(Rounding):
    """Rounds to nearest, by the one of several scales with the smallest error."""

    def _errors(self, reciprocal: PerBlock) -> PerBlock:
        """The sum of a block's errors under a scale."""
        return self.blocks.over_blocks("sum", partial(self._error, reciprocal)).make_loader()

    def _error(self, reciprocal: PerBlock, x: Value, place: Index, column: sympy.Expr) -> Value:
        """The error of x in units of the scale, in fixed point: the bits of an fp32 in [512, 1024).
        A block's sum of them wraps around, and is right again when its offset is taken off."""
        if self.fp.converts_e2m1:
            return packed.errors(x, reciprocal(place), column)
        error = ops.sub(*self._rounded(x, reciprocal(place)))
        return fp32.bits_of(self.fp.square_plus(error, _ERROR_OFFSET))

    def _without_offset(self, total: Value) -> Value:
        """A block's error, fp32, from its sum of `_error`, in units of 2^-14."""
        if self.fp.converts_e2m1:
            return ops.to_dtype(total, torch.float32)
        offset = _ERROR_OFFSET_BITS * self.blocks.height * self.blocks.width % 2**32
        offset -= offset >> 31 << 32  # as an int32
        return ops.to_dtype(ops.sub(total, integer(offset)), torch.float32)


class FourOverSix(_Compared):
    """Rounds to nearest, by that of two scales with the smaller error: `nvfp4._four_over_six`."""

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: _Pow2 | _Exact) -> None:
        super().__init__(blocks, scheme, scales)
        self._second_code, self._second_reciprocal = self._candidate(scheme.vmax / 1.5)
        errors = [self._errors(r) for r in (self._reciprocal, self._second_reciprocal)]
        self._four = blocks.computed_once(
            torch.bool, lambda place: self._takes_four(place, *errors)
        )

    def scale(self, place: Index) -> Value:
        """The scale that the block takes, as an int32."""
        return ops.where(self._four(place), self._second_code(place), self._code(place))

    def _chosen_reciprocal(self, place: Index) -> Value:
        """The factor of a block's elements under the scale that it takes."""
        return ops.where(self._four(place), self._second_reciprocal(place), self._reciprocal(place))

    def _nearest(self, x: Value, place: Index) -> Value:
        """|x| rounded, in units of the scale that its block takes."""
        _, magnitude = self._rounded(x, self._reciprocal(place))
        _, second_magnitude = self._rounded(x, self._second_reciprocal(place))
        return ops.where(self._four(place), second_magnitude, magnitude)

    def _takes_four(self, place: Index, *errors: PerBlock) -> Value:
        """Returns true where the scale for vmax / 1.5 leaves the smaller error."""
        six, four = (self._without_offset(error(place)) for error in errors)
        ratio = self.scales.ratio(self._second_code(place), self._code(place))
        return ops.lt(self.fp.mul(four, self.fp.mul(ratio, ratio)), six)


class ScaleSearch(_Compared):
    """Rounds to nearest, by the scale with the smallest error among `scheme.steps`:
    `nvfp4._scale_search`."""

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: _Pow2 | _Exact) -> None:
        super().__init__(blocks, scheme, scales)
        first = self._code
        candidates = [
            blocks.computed_once(torch.int32, partial(self._stepped, first, step))
            for step in scheme.steps
        ]
        errors = [self._errors(self._reciprocal_of(code)) for code in candidates]
        self._code = blocks.computed_once(
            torch.int32, partial(self._best, first, list(zip(candidates, errors, strict=True)))
        )
        self._reciprocal = self._reciprocal_of(self._code)

    def _stepped(self, first: PerBlock, step: int, place: Index) -> Value:
        return self.scales.stepped(first(place), step)

    def _rounded(self, x: Value, reciprocal: Value) -> tuple[Value, Value]:
        """As in the base, but clamped: a step down can put |x| over 7."""
        scaled = self._scaled(x, reciprocal)
        return scaled, fp32.round_e2m1(ops.minimum(scaled, number(E2M1_MAX)))

    def _best(
        self, first: PerBlock, candidates: list[tuple[PerBlock, PerBlock]], place: Index
    ) -> Value:
        """The scale of the smallest error, the first of them in a tie."""
        best, least = first(place), number(float("inf"))
        for code, error in candidates:
            ratio = self.scales.ratio(code(place), first(place))
            own = self.fp.mul(self._without_offset(error(place)), self.fp.mul(ratio, ratio))
            better = ops.lt(own, least)
            best = ops.where(better, code(place), best)
            least = ops.where(better, own, least)
        return best


def _rounding(blocks: ReducedBlocks, scheme: Scheme, scales: _Pow2 | _Exact) -> Rounding:
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
