# SPDX-License-Identifier: Apache-2.0
"""Blocks as reductions: 16-byte loads, whatever the producer of x (see blocks.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from q2compile.lowering.inductor_kernels.blocks import NIBBLES, Blocks, Code, Index, Kind, PerBlock
from q2compile.lowering.inductor_kernels.fp32 import Value, integer


class ReducedBlocks(Blocks):
    """Blocks that are reductions. They draw no random bits."""

    def __init__(self, x: ir.TensorBox, block: tuple[int, int]) -> None:
        super().__init__(x, block, block[1])

    def over_blocks(self, kind: Kind, fn: Callable[[Value, Index], Value]) -> ir.TensorBox:
        def inner(place: Index, offset: Index) -> Value:
            *down, across = offset
            row = place[0] * self.height + (down[0] if down else 0)
            return fn(self.load(row, place[1] * self.width + across), place)

        sizes = [self.height, self.width] if self.height > 1 else [self.width]
        return self._reduction(kind, inner, self.grid, sizes)

    def pack(self, code: Code) -> ir.TensorBox:
        """Sums of code * 16^position in int32, one for each 8 codes: products and sums are one
        instruction of the multiply-add pipe, where shifts would wait for the integer pipe.
        """
        per_row = [self.rows, self.grid[1]]

        def word(index: int) -> PerBlock:
            def inner(place: Index, offset: Index) -> Value:
                row, block = place
                x = self.load(row, block * self.width + offset[0])
                position = ops.index_expr(offset[0], torch.int32)
                nibble = ops.bitwise_and(position, integer(NIBBLES - 1))
                weight = ops.bitwise_left_shift(
                    integer(1), ops.bitwise_left_shift(nibble, integer(2))
                )
                here = ops.eq(ops.bitwise_right_shift(position, integer(3)), integer(index))
                weight = ops.where(here, weight, integer(0))
                return ops.mul(code(x, [row // self.height, block], None), weight)

            return self._reduction("sum", inner, per_row, [self.width]).make_loader()

        return self._joined([word(index) for index in range(self.width // NIBBLES)])
