# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm in Triton: tl.dot_scaled as in triton_kernel.py, for a weight for each group of
rows. The ends of the groups stay on the device, and nothing loops over groups on the host.

    a [M, K/2], b [N, K/2]    packed codes, as ops/grouped_gemm.py lays them out for each GEMM
    a_scales, b_scales        plain: [M / height of a block, K / width of a block]

fprop, dgrad (rows_in_groups): each group of rows has tiles of its own. The rows of no group, which
are zero, have the tiles after the last group's. At most (M + (E + 1) * (TILE_M - 1)) / TILE_M tiles
can come of it; as many programs are launched for each tile column. Each program finds its group:
it computes the number of tiles of each group from the E ends, which L2 holds, and adds them up.
Programs behind the last tile store nothing.

wgrad (contraction_in_groups): one program for each tile of each group's result. It loops over that
group's part of the contraction.

A tile may reach beyond its group. Such rows are read from within the matrix, and not stored. Only
the end of the contraction is masked. Epilogue, order of programs and tiles are triton_kernel.py's.

Scales are plain: the 32x4x4 layout keeps 128 rows together, and a group may begin at any row. They
pass through registers; they have 1/8 of the bytes of codes. The scales of a row are copied in
pieces whose size is a power of two that divides their number. Pieces of less than 4 bytes
can't be copied ahead. Bytes: a once for each tile column, b once for each tile row of its group.
"""

import math

import torch
import triton
import triton.language as tl

from q2compile.runtime_kernels.cuda.gemm.triton_kernel import Tile, place, scale_bytes
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.gemm import Factor


@triton.jit
def _sums(
    a,
    b,
    a_scales,
    b_scales,
    m,  # rows of a, and of b: [TILE_M], [TILE_N]
    n,
    a_blocks,  # in a row
    b_blocks,
    a_first,  # of the contraction
    b_first,
    length,  # of the contraction, in blocks
    BLOCK: tl.constexpr,
    A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """The products of those rows over that part of the contraction: fp32 [TILE_M, TILE_N]."""
    HALF: tl.constexpr = BLOCK // 2  # bytes of codes in a block
    STEP: tl.constexpr = TILE_K // BLOCK
    k, block = tl.arange(0, TILE_K // 2), tl.arange(0, STEP)
    a_at = a + m[:, None].to(tl.int64) * (a_blocks * HALF) + (a_first * HALF + k)[None, :]
    b_at = b + n[None, :].to(tl.int64) * (b_blocks * HALF) + (b_first * HALF + k)[:, None]
    a_scale_row = (m // A_HEIGHT)[:, None].to(tl.int64) * a_blocks
    b_scale_row = (n // B_HEIGHT)[:, None].to(tl.int64) * b_blocks
    a_scale_at = a_scales + a_scale_row + (a_first + block)[None, :]
    b_scale_at = b_scales + b_scale_row + (b_first + block)[None, :]
    sums = tl.zeros((m.shape[0], n.shape[0]), dtype=tl.float32)
    for step in range(tl.cdiv(length, STEP)):
        if WHOLE:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
            a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
        else:
            rest = length - step * STEP
            inside = (block < rest)[None, :]
            a_tile = tl.load(a_at, mask=k[None, :] < rest * HALF, other=0)
            b_tile = tl.load(b_at, mask=k[:, None] < rest * HALF, other=0)
            a_scale = tl.load(a_scale_at, mask=inside, other=0.0 if BLOCK == 16 else 0)
            b_scale = tl.load(b_scale_at, mask=inside, other=0.0 if BLOCK == 16 else 0)
        sums = tl.dot_scaled(a_tile, a_scale, "e2m1", b_tile, b_scale, "e2m1", sums)
        a_at += TILE_K // 2
        b_at += TILE_K // 2
        a_scale_at += STEP
        b_scale_at += STEP
    return sums


@triton.jit
def rows_in_groups(
    a,  # u8 [M, K / 2]
    b,  # u8: the weight of a group begins at row group * b_rows, block group * b_along
    a_scales,  # e4m3, or e8m0 as u8
    b_scales,
    a_global,  # fp32
    b_global,
    offs,  # i32 [groups]
    out,  # [M, N]
    M,
    N,
    blocks,  # in a row of a
    b_blocks,
    groups,
    b_rows,
    b_along,
    BLOCK: tl.constexpr,  # elements that share a scale: 16 or 32
    A_HEIGHT: tl.constexpr,  # rows that do
    B_HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,  # bytes that the scales of every row begin at multiples of
    WHOLE: tl.constexpr,  # the contraction ends with a tile
    ENTRIES: tl.constexpr,  # a power of two, more than there are groups
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    blocks, b_blocks = tl.multiple_of(blocks, ALIGNED), tl.multiple_of(b_blocks, ALIGNED)
    b_along = tl.multiple_of(b_along, ALIGNED)
    tiles_m = (M + (groups + 1) * (TILE_M - 1)) // TILE_M
    tile_m, tile_n = place(tl.program_id(0), tiles_m, tl.cdiv(N, TILE_N))
    # The rows of no group are one group more; entries behind it are empty.
    e = tl.arange(0, ENTRIES)
    ends = tl.where(e < groups, tl.load(offs + e, mask=e < groups, other=0), M)
    starts = tl.load(offs + e - 1, mask=(e > 0) & (e <= groups), other=0)
    starts = tl.where(e > groups, M, starts)
    tiles = tl.cdiv(ends - starts, TILE_M)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile_m).to(tl.int32), 0)
    ahead = tl.sum(tl.where(e < group, tiles, 0), 0)
    start = tl.sum(tl.where(e == group, starts, 0), 0)
    end = tl.sum(tl.where(e == group, ends, 0), 0)  # 0 behind the last tile

    m = start + (tile_m - ahead) * TILE_M + tl.arange(0, TILE_M)
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    weight = tl.minimum(group, groups - 1)
    sums = _sums(
        *(a, b, a_scales, b_scales),
        *(tl.minimum(m, M - 1), weight * b_rows + tl.minimum(n, N - 1)),
        *(blocks, b_blocks, 0, weight * b_along, tl.where(group < groups, blocks, 0)),
        *(BLOCK, A_HEIGHT, B_HEIGHT, WHOLE, TILE_K),
    )
    alpha = tl.load(a_global) * tl.load(b_global)
    sums *= tl.where(group < groups, alpha, 0.0)
    out_at = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < N))


@triton.jit
def contraction_in_groups(
    a,  # u8 [M, K / 2]
    b,  # u8 [N, K / 2]
    a_scales,  # e4m3, or e8m0 as u8
    b_scales,
    a_global,  # fp32
    b_global,
    offs,  # i32 [groups]
    out,  # [groups * M, N]
    M,
    N,
    blocks,  # in a row
    BLOCK: tl.constexpr,
    A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n)
    start, end = tl.load(offs + group - 1, mask=group > 0, other=0), tl.load(offs + group)
    # Ends of groups are multiples of 128.
    CHUNK: tl.constexpr = 128 // BLOCK
    blocks, first = tl.multiple_of(blocks, CHUNK), start // 128 * CHUNK
    m, n = tile_m * TILE_M + tl.arange(0, TILE_M), tile_n * TILE_N + tl.arange(0, TILE_N)
    sums = _sums(
        *(a, b, a_scales, b_scales),
        *(tl.minimum(m, M - 1), tl.minimum(n, N - 1)),
        *(blocks, blocks, first, first, (end - start) // 128 * CHUNK),
        *(BLOCK, A_HEIGHT, B_HEIGHT, False, TILE_K),
    )
    sums *= tl.load(a_global) * tl.load(b_global)
    row = group.to(tl.int64) * M + m[:, None]
    out_at = out + row * N + n[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def grouped_gemm_fp4(
    a: Factor,
    b: Factor,
    offs: torch.Tensor,
    gemm: str,
    dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    """The products of two operands of one format, of which no size is 0: see
    ops/grouped_gemm.py."""
    groups, m, columns = offs.shape[0], a.codes.shape[0], b.codes.shape[0]
    width = a.spec.width
    blocks = a.contraction // width
    n = columns // groups if gemm == "fprop" else columns
    out = a.codes.new_empty((groups * m if gemm == "wgrad" else m, n), dtype=dtype)
    pointers = (
        *(a.codes.contiguous(), b.codes.contiguous()),
        *(scale_bytes(a.scales.contiguous()), scale_bytes(b.scales.contiguous())),
        *(a.global_scale, b.global_scale, offs.contiguous(), out),
    )
    common = {
        "BLOCK": width,
        "A_HEIGHT": a.spec.block[0],
        "B_HEIGHT": b.spec.block[0],
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "TILE_K": tile.k,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
    }
    across = ceil_div(n, tile.n)
    if gemm == "wgrad":
        grid = (groups * ceil_div(m, tile.m) * across,)
        contraction_in_groups[grid](*pointers, m, n, blocks, **common)
        return out
    down = (m + (groups + 1) * (tile.m - 1)) // tile.m
    of_b = (blocks, groups, n, 0) if gemm == "fprop" else (groups * blocks, groups, 0, blocks)
    rows_in_groups[(down * across,)](
        *pointers,
        *(m, n, blocks, *of_b),
        ALIGNED=math.gcd(blocks, 16),
        WHOLE=blocks % (tile.k // width) == 0,
        ENTRIES=triton.next_power_of_2(groups + 1),
        **common,
    )
    return out
