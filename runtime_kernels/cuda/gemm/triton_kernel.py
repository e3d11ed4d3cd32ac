# SPDX-License-Identifier: Apache-2.0
"""q2::gemm in Triton: tl.dot_scaled, which is one tensor-core instruction on 4-bit operands on
Blackwell (tcgen05 with block scales on 10.x, mma with block scales on 12.x).

    a [M, K/2], b [N, K/2]    packed codes; M and N any, K whole blocks
    a_scales, b_scales        swizzled (numerics/swizzle.py): each 512 contiguous bytes are those
                              of 128 rows and 4 blocks, so that a tile's come in loads of 16 bytes
    out [M, N] = (sum over k of a * b) * (a_global * b_global) + bias

The epilogue multiplies by both global scales and adds the bias in fp32, before the one rounding. So
the GEMM is one launch. With a mask the epilogue then masks and rotates the rounded product
(ops/masked_unrotate.py); no chunk of 32 columns lies in two tiles. On 10.x a thread has whole
chunks in registers; on 12.x four threads share one, which costs shuffles.

A tile may reach beyond the matrix. Such rows are read from within the matrix, and not stored. Only
the end of K is masked.

The scales of a tile of 128 rows are copied from shared to tensor memory unchanged. Those of 256
columns pass through registers: an eighth of the tile's bytes.

Program ids run through groups of 8 tile rows, so that neighbors share B in L2. Bytes: A once for
each tile column, B once for each tile row.

Triton before 3.8 asserts on 12.1.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.gemm import Factor


class Unrotation(NamedTuple):
    """The epilogue of q2::masked_unrotate."""

    mask: torch.Tensor  # uint8 [M, N / 8], in one piece
    norm: float  # of the transform


class Tile(NamedTuple):
    """m, n: of the result; k: of the contraction, in elements; stages: loads of the loop in flight;
    warps of a thread block."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


# By the generation of tensor cores. 10.x: accumulators are in tensor memory, where 8 warps read 128
# columns each; 227 KiB of shared memory. 12.x: accumulators are in registers, and shared memory
# ends at 99 KiB. The small tiles are for products of too few large ones to keep all multiprocessors
# busy.
_TILES = {
    10: (Tile(128, 256, 256, 4, 8), Tile(128, 128, 256, 5, 4)),
    12: (Tile(128, 256, 128, 4, 8), Tile(128, 128, 128, 5, 8)),
}


def choose_tile(major: int, m: int, n: int, multiprocessors: int, results: int = 1) -> Tile:
    """The tile for so many results [m, n] in one launch: the large one where at least one wave of
    them is full, otherwise the small one."""
    large, small = _TILES[min(_TILES, key=lambda known: (known > major, major - known))]
    tiles = results * ceil_div(m, large.m) * ceil_div(n, large.n)
    return large if tiles >= multiprocessors else small


@triton.jit
def place(program, tiles_m, tiles_n):
    """A program's tile row and column: groups of 8 tile rows, column after column."""
    first = program // (8 * tiles_n) * 8
    height = min(tiles_m - first, 8)
    inside = program % (8 * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def _scales(
    at,  # e4m3, or e8m0 as u8, swizzled
    row,  # the tile's first row, a multiple of 128
    rows,  # of the matrix
    across,  # tiles of 4 blocks in a row
    k_tile,  # the first of them
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A tile's scales [TILE, TILE_K / BLOCK], loaded as [TILE / 128, bytes]: in this form the
    compiler copies them from shared to tensor memory as they are."""
    BYTES: tl.constexpr = TILE_K // BLOCK * 128
    i = tl.minimum(row // 128 + tl.arange(0, TILE // 128), tl.cdiv(rows, 128) - 1)
    j = tl.arange(0, BYTES)
    at += (i.to(tl.int64) * across + k_tile)[:, None] * 512 + j[None, :]
    if WHOLE:
        found = tl.load(at)
    else:
        inside = (k_tile * 512 + j < across * 512)[None, :]
        found = tl.load(at, mask=inside, other=0.0 if BLOCK == 16 else 0)
    found = found.reshape(TILE // 128, TILE_K // BLOCK // 4, 32, 4, 4)
    return found.trans(0, 3, 2, 1, 4).reshape(TILE, TILE_K // BLOCK)


@triton.jit
def _unrotated(
    x,  # fp32 [TILE_M, TILE_N]
    mask,  # u32 [M, N / 32]
    m,  # the tile's rows: [TILE_M]
    left,  # its first column
    M,
    N,
    NORM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """H of each chunk of 32, where the mask has ones: transforms.py:hadamard's order of operations.

    Each step takes pairs of neighbors, and leaves all sums ahead of all differences: after five of
    them every element is in its place, and step i has paired those 2^i apart.
    """
    CHUNKS: tl.constexpr = TILE_N // 32
    chunk = left // 32 + tl.arange(0, CHUNKS)
    at = mask + m[:, None].to(tl.int64) * (N // 32) + chunk[None, :]
    mask_bits = tl.load(at, mask=(m[:, None] < M) & (chunk[None, :] < N // 32), other=0)
    mask_bits = (mask_bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    x = tl.where(mask_bits != 0, x.reshape(TILE_M, CHUNKS, 32), 0.0)
    for _ in tl.static_range(5):
        a, b = tl.split(x.reshape(TILE_M, CHUNKS, 16, 2))
        x = tl.join(a + b, a - b).trans(0, 1, 3, 2).reshape(TILE_M, CHUNKS, 32)
    return x.reshape(TILE_M, TILE_N) * NORM


@triton.jit
def _gemm_fp4(
    a,  # u8 [M, K/2]
    b,  # u8 [N, K/2]
    a_scales,  # e4m3, or e8m0 as u8, swizzled
    b_scales,
    a_global,  # fp32
    b_global,
    bias,  # [N], or unused
    mask,  # u32 [M, N / 32], or unused
    out,  # [M, N]
    M,
    N,
    half,  # K / 2, bytes of codes in a row
    BLOCK: tl.constexpr,  # elements that share a scale: 16 or 32
    BIASED: tl.constexpr,
    NORM: tl.constexpr,  # of the rotation back; None without one
    WHOLE: tl.constexpr,  # K ends with a tile
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tile_m, tile_n = place(tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N))
    top, left = tile_m * TILE_M, tile_n * TILE_N
    m, n = top + tl.arange(0, TILE_M), left + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K // 2)  # bytes
    across = tl.cdiv(half, 2 * BLOCK)
    a_at = a + (m % M)[:, None].to(tl.int64) * half + k[None, :]
    b_at = b + (n % N)[None, :].to(tl.int64) * half + k[:, None]
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for step in range(tl.cdiv(half, TILE_K // 2)):
        at = step * (TILE_K // BLOCK // 4)
        a_scale = _scales(a_scales, top, M, across, at, BLOCK, WHOLE, TILE_M, TILE_K)
        b_scale = _scales(b_scales, left, N, across, at, BLOCK, WHOLE, TILE_N, TILE_K)
        if WHOLE:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
        else:
            rest = half - step * (TILE_K // 2)
            a_tile = tl.load(a_at, mask=k[None, :] < rest, other=0)
            b_tile = tl.load(b_at, mask=k[:, None] < rest, other=0)
        sums = tl.dot_scaled(a_tile, a_scale, "e2m1", b_tile, b_scale, "e2m1", sums)
        a_at += TILE_K // 2
        b_at += TILE_K // 2
    sums *= tl.load(a_global) * tl.load(b_global)
    if BIASED:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if NORM is not None:
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums = _unrotated(sums, mask, m, left, M, N, NORM, TILE_M, TILE_N)
    out_at = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def gemm_fp4(
    a: Factor,
    b: Factor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
    unrotation: Unrotation | None = None,
) -> torch.Tensor:
    """The product of two quantized matrices of one format, whose scales are swizzled: [M, N]. With
    `unrotation`, N is whole chunks."""
    m, n, half = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]
    b_global = a.global_scale.new_ones(()) if b.global_scale is None else b.global_scale
    out = torch.empty((m, n), dtype=dtype, device=a.codes.device)
    _gemm_fp4[(ceil_div(m, tile.m) * ceil_div(n, tile.n),)](
        a.codes.contiguous(),
        b.codes.contiguous(),
        scale_bytes(a.scales),
        scale_bytes(b.scales),
        a.global_scale,
        b_global,
        out if bias is None else bias,
        out if unrotation is None else unrotation.mask.view(torch.uint32),
        out,
        m,
        n,
        half,
        BLOCK=a.spec.width,
        BIASED=bias is not None,
        NORM=None if unrotation is None else unrotation.norm,
        WHOLE=2 * half % tile.k == 0,
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    return out


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Triton knows no e8m0 pointers: the exponents as bytes."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
