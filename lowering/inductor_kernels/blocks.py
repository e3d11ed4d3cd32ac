# SPDX-License-Identifier: Apache-2.0
"""A matrix in blocks, in Inductor's IR.

A block of 16 is a reduction of 16. Its maximum, the errors of the two candidates of 4/6, and the
packing of its codes are reductions over the same range. Inductor fuses them into one persistent
reduction, with the producer of x inlined. Loads are then contiguous and wide, whatever the
producer. In a pointwise kernel over blocks, each thread would load its 16 elements one by one: 32
cache sectors for each load of a warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from q2compile.lowering.inductor_kernels import packed
from q2compile.lowering.inductor_kernels.fp32 import Fp32, Value, integer, magnitude_bits
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme

Index = Sequence[sympy.Expr]
PerBlock = Callable[[Index], Value]  # (block row, block) -> a value of that block
PerElement = Callable[[Index, Index], Value]  # ((row, block), (position,)) -> a value
# (x, place of its block, its column there) -> a value of that element
OfElement = Callable[[Value, Index, sympy.Expr], Value]
Kind = Literal["max", "sum"]
NIBBLES = 8  # of an int32


class ReducedBlocks:
    """A matrix x [M, K] in blocks of height rows and width columns; elements outside of it are 0.

    A block is at (row // height, column // width) of a grid [ceil(M/height), ceil(K/width)].
    """

    def __init__(self, x: ir.TensorBox, block: tuple[int, int]) -> None:
        self.height, self.width = block
        self.device = x.get_device_or_error()
        self.fp = Fp32(self.device)
        shape = x.get_size()
        self.rows, columns = shape
        self.grid = [ceil_div(self.rows, self.height), ceil_div(columns, self.width)]
        self._load = x.make_loader()
        known = V.graph.sizevars.statically_known_multiple_of
        self._bounds = [
            (axis, size)
            for axis, (size, whole) in enumerate(zip(shape, block, strict=True))
            if not known(size, whole)
        ]

    def over_blocks(self, kind: Kind, fn: OfElement) -> ir.TensorBox:
        """The reduction ("max" or "sum", int32) over each block of fn."""

        def inner(place: Index, offset: Index) -> Value:
            *down, across = offset
            row = place[0] * self.height + (down[0] if down else 0)
            return fn(self.load(row, place[1] * self.width + across), place, across)

        sizes = [self.height, self.width] if self.height > 1 else [self.width]
        return self._reduction(kind, inner, self.grid, sizes)

    def pack(self, code: OfElement) -> ir.TensorBox:
        """The codes, int32 in [0, 16) or as of `packed.codes`, packed: uint8 [M, blocks * 8].

        Sums of code * 16^position in int32, one for each 8 codes: products and sums are one
        instruction of the multiply-add pipe, where shifts would wait for the integer pipe.
        """
        per_row = [self.rows, self.grid[1]]
        together = packed.FOUR if self.fp.converts_e2m1 else 1

        def word(index: int) -> PerBlock:
            def inner(place: Index, offset: Index) -> Value:
                row, block = place
                x = self.load(row, block * self.width + offset[0])
                position = ops.index_expr(offset[0], torch.int32)
                nibble = ops.bitwise_and(position, integer(NIBBLES - together))
                weight = ops.bitwise_left_shift(
                    integer(1), ops.bitwise_left_shift(nibble, integer(2))
                )
                here = ops.eq(ops.bitwise_right_shift(position, integer(3)), integer(index))
                weight = ops.where(here, weight, integer(0))
                return ops.mul(code(x, [row // self.height, block], offset[0]), weight)

            return self._reduction("sum", inner, per_row, [self.width]).make_loader()

        return self._joined(word(0), word(1))

    def load(self, row: sympy.Expr, column: sympy.Expr) -> Value:
        """x[row, column] as fp32, 0 outside."""
        place = [row, column]
        inside = None
        for axis, size in self._bounds:
            bound = ops.lt(
                ops.index_expr(place[axis], torch.int64), ops.index_expr(size, torch.int64)
            )
            inside = bound if inside is None else ops.logical_and(inside, bound)

        def value() -> Value:
            return ops.to_dtype(self._load(place), torch.float32)

        if inside is None:
            return value()
        return ops.masked(inside, value, 0.0)

    def largest(self) -> ir.TensorBox:
        """Bits of the largest |x| of each block."""
        if self.fp.converts_e2m1:
            return self.over_blocks("max", lambda x, _, column: packed.largest(x, column))
        return self.over_blocks("max", lambda x, *_: magnitude_bits(x))

    def _joined(self, low: PerBlock, high: PerBlock) -> ir.TensorBox:
        """Two int32 words of each row of each block, 8 codes per word -> uint8 [M, blocks * 8],
        stored together."""

        def inner(place: Index) -> Value:
            mask = ops.constant(0xFFFFFFFF, torch.int64)
            lower = ops.bitwise_and(ops.to_dtype(low(place), torch.int64), mask)
            upper = ops.to_dtype(high(place), torch.int64)
            shift = ops.constant(32, torch.int64)
            return ops.bitwise_or(lower, ops.bitwise_left_shift(upper, shift))

        # Inductor's mark for contiguous rows: wide buffers could otherwise get padded rows.
        V.current_node.meta["dislike_padding"] = True
        ranges = [self.rows, self.grid[1]]
        pairs = ir.Pointwise.create(
            device=self.device, dtype=torch.int64, inner_fn=inner, ranges=ranges
        )
        return reinterpreted(pairs, torch.uint8)

    def computed_once(self, dtype: torch.dtype, fn: PerBlock) -> PerBlock:
        """fn of every block, computed once (a buffer of its own)."""
        return self.per_block(dtype, fn).make_loader()

    def scales(self, byte: PerBlock, scheme: Scheme) -> ir.TensorBox:
        """The scales with these bytes (uint8); for schemes with swizzled scales, swizzled by a
        kernel of its own."""
        bytes_ = self.per_block(torch.uint8, byte)
        if scheme.swizzled:
            bytes_ = self._swizzled(bytes_)
        return reinterpreted(bytes_, torch.float8_e4m3fn)

    def _swizzled(self, bytes_: ir.TensorBox) -> ir.TensorBox:
        """[rows, blocks] -> [tiles, 512] (runtime_kernels/numerics/swizzle.py)."""
        rows, blocks = self.grid
        across = ceil_div(blocks, 4)
        load = bytes_.make_loader()

        def inner(place: Index) -> Value:
            tile, at = place
            row = FloorDiv(tile, across) * 128 + ModularIndexing(at, 4, 4) * 32 + FloorDiv(at, 16)
            block = ModularIndexing(tile, 1, across) * 4 + ModularIndexing(at, 1, 4)
            inside = ops.logical_and(
                ops.lt(ops.index_expr(row, torch.int64), ops.index_expr(rows, torch.int64)),
                ops.lt(ops.index_expr(block, torch.int64), ops.index_expr(blocks, torch.int64)),
            )
            return ops.masked(inside, lambda: load([row, block]), 0)

        ranges = [ceil_div(rows, 128) * across, 512]
        return ir.Pointwise.create(
            device=self.device, dtype=torch.uint8, inner_fn=inner, ranges=ranges
        )

    def per_block(self, dtype: torch.dtype, fn: PerBlock) -> ir.TensorBox:
        """fn of every block, a buffer [blocks down, blocks across]."""
        box = ir.Pointwise.create(
            device=self.device, dtype=dtype, inner_fn=fn, ranges=list(self.grid)
        )
        box.realize()
        return box

    def scalar(self, dtype: torch.dtype, fn: Callable[[], Value]) -> ir.TensorBox:
        """A 0-dim tensor, computed once."""
        box = ir.Pointwise.create(
            device=self.device, dtype=dtype, inner_fn=lambda _: fn(), ranges=[]
        )
        box.realize()
        return box

    def _reduction(self, kind: Kind, inner: PerElement, ranges: Any, sizes: list[int]) -> Any:
        box = ir.Reduction.create(
            device=self.device,
            dst_dtype=torch.int32,
            src_dtype=torch.int32,
            inner_fn=inner,
            ranges=list(ranges),
            reduction_ranges=sizes,
            reduction_type=kind,
        )
        box.realize()
        return box


def reinterpreted(box: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    """The same memory as another dtype. A call of torch's view at run time: Inductor's views do not
    change the size of an element, and Triton has no e4m3 below sm_89."""
    box.realize()
    box.freeze_layout()
    return fallback_handler(torch.ops.aten.view.dtype, add_to_fallback_set=False)(box, dtype)
