# SPDX-License-Identifier: Apache-2.0
"""Shapes of quantized tensors, packing, and the tiles that the reference computes on.

Shape legend: M rows, K contraction, Kp = K rounded up to whole blocks (and whole chunks of a
rotation).

Codes: uint8 [M, Kp/2], two per byte, the low nibble is the even index; a code is sign << 3 | index
into {0, .5, 1, 1.5, 2, 3, 4, 6}. Of fp8: float8_e4m3fn [M, Kp].

Tiles: the reference works on fp32 [outer, size, lanes] with a block (or chunk) along the middle
dimension. A block's scale is then a [outer, 1, lanes] tensor that broadcasts along contiguous
memory, and the sum of a block is a sum of contiguous rows: on a CPU the maxima of the blocks of
2^19 elements take 0.09 ms, over [blocks, 16] 0.62 (one core of an EPYC, torch 2.13). An operand
whose contraction is its first dimension needs no transposition at all.
"""

from dataclasses import dataclass

import torch

from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform


def ceil_div(a, b):
    """ceil(a / b) for non-negative ints, written so that symbolic sizes gain no guard."""
    return (a + b - 1) // b


def padded(contraction, scheme: Scheme, transform: Transform):
    """Kp: the contraction rounded up to whole blocks and whole chunks. Works on symbolic sizes."""
    unit = max(scheme.width, transform.size)
    return ceil_div(contraction, unit) * unit


def scales_shape(rows, blocks, scheme: Scheme) -> tuple:
    """The shape for `blocks` scales per row: [rows / rows of a block, blocks], or swizzled, one
    tile per row; empty for a scheme without block scales."""
    if not scheme.has_block_scales:
        return 0, 0
    if scheme.swizzled:
        return ceil_div(rows, 128) * ceil_div(blocks, 4), 512
    return ceil_div(rows, scheme.block[0]), blocks


def empty_quantized(
    x: torch.Tensor, rows, contraction, scheme: Scheme, transform: Transform
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialized (codes, scales, global_scale) of a quantized [rows, contraction] on x's device:
    what the fakes return."""
    width = padded(contraction, scheme, transform)
    scale_dtype = torch.float8_e8m0fnu if scheme.format == "mxfp4" else torch.float8_e4m3fn
    return (
        x.new_empty((rows, width // scheme.packed), dtype=scheme.codes_dtype),
        x.new_empty(scales_shape(rows, width // scheme.width, scheme), dtype=scale_dtype),
        x.new_empty((), dtype=torch.float32),
    )


@dataclass(frozen=True)
class Tiling:
    """How a matrix of `rows` rows is cut along its contraction into `pieces` pieces of `size`.

    transpose: the matrix is in memory as [contraction, rows].
    """

    rows: int
    pieces: int
    size: int
    transpose: bool

    @staticmethod
    def of(x: torch.Tensor, size: int, *, transpose: bool) -> "Tiling":
        """The tiling of x, [rows, contraction] or with transpose [contraction, rows]."""
        rows, contraction = reversed(x.shape) if transpose else x.shape
        return Tiling(rows, ceil_div(contraction, size), size, transpose)

    def cut(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Tiles of x, a new tensor, zero-padded: [1, size, rows * pieces], or with transpose
        [pieces, size, rows]. Takes any strides and any dtype."""
        padding = self.pieces * self.size - x.shape[0 if self.transpose else 1]
        if padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding) if self.transpose else (0, padding))
        if self.transpose:
            return _copy(x, dtype).view(self.pieces, self.size, self.rows)
        lanes = self.rows * self.pieces
        return _copy(x.reshape(lanes, self.size).t(), dtype).view(1, self.size, lanes)

    def join(self, tiles: torch.Tensor) -> torch.Tensor:
        """Undoes cut for tiles with n values per piece, any n: contiguous [rows, pieces * n]."""
        n = tiles.shape[1]
        if self.transpose:
            rows_first = tiles.permute(2, 0, 1)
        else:
            rows_first = tiles.view(n, self.rows, self.pieces).permute(1, 2, 0)
        return rows_first.contiguous().view(self.rows, self.pieces * n)


def _copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [n, w, lanes] -> [n, w/2, lanes], two per byte, the even index low."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [M, Kp/2], two codes per byte -> uint8 [M, Kp], one per byte."""
    return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """bool [n, w, lanes] -> uint8 [n, w/8, lanes], the little bit first."""
    packed = bits[:, 0::8].to(torch.uint8)
    for i in range(1, 8):
        packed |= bits[:, i::8].to(torch.uint8) << i
    return packed


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [M, Kp/8], the little bit first -> bool [M, Kp]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> shifts) & 1).flatten(1).bool()
