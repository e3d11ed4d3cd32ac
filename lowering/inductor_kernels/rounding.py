# SPDX-License-Identifier: Apache-2.0
"""Rounding of blocks by their scales to codes, for both kinds of scales of nvfp4.py.

A block's scale is held as a small int32, whose meaning is that kind's.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from q2compile.lowering.inductor_kernels import fp32, packed
from q2compile.lowering.inductor_kernels.blocks import Index, PerBlock, ReducedBlocks
from q2compile.lowering.inductor_kernels.fp32 import Fp32, Value, integer, number
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, Scheme

Quantized = tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox]
_ERROR_OFFSET = 512.0  # the last bit of an fp32 in [512, 1024) weighs 2^-14
_ERROR_OFFSET_BITS = 0x44000000  # of that fp32


class Scales(Protocol):
    """How the blocks of one tensor are scaled."""

    fp: Fp32

    def code(self, place: Index, vmax: float) -> Value:
        """The scale that maps the block's largest to vmax, as an int32."""

    def reciprocal(self, code: Value) -> Value:
        """The factor that x is multiplied by under a scale."""

    def within(self, scaled: Value) -> Value:
        """A scaled magnitude below 7, without a change of what it rounds to."""

    def ratio(self, four: Value, six: Value) -> Value:
        """The quotient of two scales."""

    def stepped(self, code: Value, step: int) -> Value:
        """The scale so many e4m3 steps up: `nvfp4._stepped`."""


class Rounding:
    """Codes of elements and scales of blocks, to nearest.

    Each per-block value is a buffer of its own. All end up in registers of one kernel. As nested
    expressions they took most of the compile time."""

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: Scales) -> None:
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

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: Scales) -> None:
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
        """Whether the scale for vmax / 1.5 leaves the smaller error."""
        six, four = (self._without_offset(error(place)) for error in errors)
        ratio = self.scales.ratio(self._second_code(place), self._code(place))
        return ops.lt(self.fp.mul(four, self.fp.mul(ratio, ratio)), six)


class ScaleSearch(_Compared):
    """Rounds to nearest, by the scale with the smallest error among `scheme.steps`:
    `nvfp4._scale_search`."""

    def __init__(self, blocks: ReducedBlocks, scheme: Scheme, scales: Scales) -> None:
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
