# SPDX-License-Identifier: Apache-2.0
"""Blocks in the registers of one thread: for rotations and for random bits.

Each output of a rotation is a sum over its whole chunk, and one call of Philox gives the random
bits of eight neighbors. Both need the elements of a chunk in the registers of one thread, where
reduction_blocks.py has one element per thread. The price: elements are loaded one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from q2compile.lowering.inductor_kernels.blocks import NIBBLES, Blocks, Code, Index, Kind, PerBlock
from q2compile.lowering.inductor_kernels.fp32 import Value, integer, number, shifted_left
from q2compile.lowering.inductor_kernels.philox import element_bits, philox4x32
from q2compile.runtime_kernels.numerics.philox import RANDOM_BITS, SIGNS
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import FIXED_SIGN_SEED, Transform


@dataclass(frozen=True)
class Draws:
    """Where signs and random bits come from. seed: loads it, int64, from []; None where nothing is
    drawn."""

    seed: PerBlock | None
    rng_offset: int


class HeldBlocks(Blocks):
    """x [M, K], or with transpose [K, M], rotated along K, which is padded to whole chunks."""

    def __init__(
        self, x: ir.TensorBox, scheme: Scheme, rotation: Transform, draws: Draws, *, transpose: bool
    ) -> None:
        unit = max(scheme.width, rotation.size)
        super().__init__(x, scheme.block, unit, transpose=transpose)
        self._scheme, self._rotation, self._draws = scheme, rotation, draws
        self.norm = rotation.norm
        self._signs = None if rotation.signs == "none" else self._drawn_signs()

    def over_blocks(self, kind: Kind, fn: Callable[[Value, Index], Value]) -> ir.TensorBox:
        merge = ops.maximum if kind == "max" else ops.add
        return self.per_block(
            torch.int32, lambda place: reduce(merge, (fn(x, place) for x in self._block(place)))
        )

    def pack(self, code: Code) -> ir.TensorBox:
        def word(first: int) -> PerBlock:
            def inner(place: Index) -> Value:
                elements = self._block(place)[first : first + NIBBLES]
                random = self._random(place, first)
                codes = (code(x, place, bits) for x, bits in zip(elements, random, strict=True))
                return reduce(ops.bitwise_or, (shifted_left(c, 4 * i) for i, c in enumerate(codes)))

            return inner

        return self._joined([word(first) for first in range(0, self.width, NIBBLES)])

    def _block(self, place: Index) -> list[Value]:
        """The rotated elements of a block. The whole chunk is rotated, of which the block may be a
        part."""
        row, block = place
        blocks_per_chunk = self.unit // self.width
        start = FloorDiv(block, blocks_per_chunk) * self.unit
        elements = [self.load(row, start + i) for i in range(self.unit)]
        size = self._rotation.size
        if size > 1:
            chunks = (elements[i : i + size] for i in range(0, self.unit, size))
            elements = [y for chunk in chunks for y in self._rotated(chunk)]
        if blocks_per_chunk == 1:
            return elements
        first = ops.eq(
            ops.index_expr(ModularIndexing(block, 1, blocks_per_chunk), torch.int32), integer(0)
        )
        lower, upper = elements[: self.width], elements[self.width :]
        return [ops.where(first, a, b) for a, b in zip(lower, upper, strict=True)]

    def _rotated(self, chunk: Sequence[Value]) -> list[Value]:
        """`quantize_tiles.rotate_tiles` of a chunk."""
        elements = list(chunk)
        if self._signs is not None:
            word = self._signs([])
            for i, x in enumerate(elements):
                bit = ops.bitwise_and(word, ops.constant(1 << i, torch.int64))
                unset = ops.eq(bit, ops.constant(0, torch.int64))
                # Not ops.neg: Triton's -x is 0 - x, which has no sign where x is 0.
                elements[i] = ops.mul(x, ops.where(unset, number(1.0), number(-1.0)))
        elements[0] = ops.add(elements[0], number(0.0))  # +0 for -0: rotated zeros are +0
        h = 1
        while h < len(elements):
            for i in range(len(elements)):
                if not i & h:
                    a, b = elements[i], elements[i + h]
                    elements[i], elements[i + h] = ops.add(a, b), ops.sub(a, b)
            h *= 2
        return elements

    def _seed(self) -> Value:
        assert self._draws.seed is not None, "the op's fake checks it"
        return self._draws.seed([])

    def _drawn_signs(self) -> PerBlock:
        """The word whose bits are the signs: `transforms.signs_of`."""

        def word() -> Value:
            fixed = self._rotation.signs == "fixed"
            seed = ops.constant(FIXED_SIGN_SEED, torch.int64) if fixed else self._seed()
            return philox4x32(seed, ops.constant(0, torch.int64), rng_offset=0, purpose=SIGNS)[0]

        return self.scalar(torch.int64, word).make_loader()

    def _random(self, place: Index, first: int) -> Sequence[Value | None]:
        """Random bits of the eight elements from `first` on of a block: those of element i of the
        padded, row-major matrix."""
        if not self._scheme.stochastic:
            return [None] * NIBBLES
        row, block = place
        octets = (row * self.grid[1] + block) * (self.width // NIBBLES) + first // NIBBLES
        index = ops.index_expr(octets, torch.int64)
        return element_bits(self._seed(), index, self._draws.rng_offset, RANDOM_BITS)
