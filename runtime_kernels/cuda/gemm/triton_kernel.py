"""q2::gemm in Triton: tl.dot_scaled, which is one tensor-core instruction on 4-bit operands on
Blackwell (tcgen05 with block scales on 10.x, mma with block scales on 12.0).

The second choice there, behind cuBLASLt: it takes scales in q2's plain layout and adds the bias
before the one rounding. Triton before 3.8 asserts on 9.0 and 12.1.

Tiles of 128 x 128 and 128 of the contraction; program ids in groups of 8 tile rows, so that
neighbours share B in L2. Bytes: A once for each 128 columns of the result, B for each 128 rows.
"""

import torch
import triton
import triton.language as tl

from q2compile.runtime_kernels.numerics.schemes import Scheme

TILE = 128
_GROUP = 8


@triton.jit
def _gemm_fp4(
    a,  # u8 [M, K/2]
    b,  # u8 [N, K/2]
    a_scales,  # e4m3 (or e8m0 as u8) [ceil(M / A_ROWS), K / BLOCK]
    b_scales,
    a_global,  # fp32
    b_global,
    bias,  # [N], or unused
    out,  # [M, N]
    M,
    N,
    K,
    BLOCK: tl.constexpr,  # elements that share a scale: 16 or 32
    A_ROWS: tl.constexpr,  # rows that share a scale: 1 or 16
    B_ROWS: tl.constexpr,
    BIASED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    m = (first + program % (GROUP * tiles_n) % height) * TILE + tl.arange(0, TILE)
    n = program % (GROUP * tiles_n) // height * TILE + tl.arange(0, TILE)
    k = tl.arange(0, TILE // 2)  # bytes
    s = tl.arange(0, TILE // BLOCK)
    half, blocks = K // 2, K // BLOCK
    a_at = a + m[:, None].to(tl.int64) * half + k[None, :]
    b_at = b + n[None, :].to(tl.int64) * half + k[:, None]
    a_scales_at = a_scales + (m // A_ROWS)[:, None].to(tl.int64) * blocks + s[None, :]
    b_scales_at = b_scales + (n // B_ROWS)[:, None].to(tl.int64) * blocks + s[None, :]
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for at in range(0, K, TILE):
        k_left, s_left = half - at // 2, blocks - at // BLOCK
        a_tile = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < k_left), other=0)
        b_tile = tl.load(b_at, mask=(n[None, :] < N) & (k[:, None] < k_left), other=0)
        a_scale = tl.load(a_scales_at, mask=(m[:, None] < M) & (s[None, :] < s_left), other=0.0)
        b_scale = tl.load(b_scales_at, mask=(n[:, None] < N) & (s[None, :] < s_left), other=0.0)
        sums = tl.dot_scaled(a_tile, a_scale, "e2m1", b_tile, b_scale, "e2m1", sums)
        a_at += TILE // 2
        b_at += TILE // 2
        a_scales_at += TILE // BLOCK
        b_scales_at += TILE // BLOCK
    sums *= tl.load(a_global) * tl.load(b_global)
    if BIASED:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_at = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def gemm_fp4(
    a: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    a_spec: Scheme,
    b_spec: Scheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of two quantised matrices (codes, scales, global_scale) of one format: [M, N]."""
    (a_codes, a_scales, a_global), (b_codes, b_scales, b_global) = a, b
    m, n = a_codes.shape[0], b_codes.shape[0]
    out = torch.empty((m, n), dtype=dtype, device=a_codes.device)
    if out.numel() == 0:
        return out
    _gemm_fp4[(triton.cdiv(m, TILE) * triton.cdiv(n, TILE),)](
        a_codes.contiguous(),
        b_codes.contiguous(),
        _plain(a_scales),
        _plain(b_scales),
        a_global,
        b_global,
        out if bias is None else bias,
        out,
        m,
        n,
        2 * a_codes.shape[1],
        BLOCK=a_spec.width,
        A_ROWS=a_spec.block[0],
        B_ROWS=b_spec.block[0],
        BIASED=bias is not None,
        TILE=TILE,
        GROUP=_GROUP,
        num_warps=4 if torch.cuda.get_device_capability(a_codes.device)[0] == 10 else 8,
    )
    return out


def _plain(scales: torch.Tensor) -> torch.Tensor:
    """Triton knows no e8m0 pointers: the exponents as bytes."""
    scales = scales.contiguous()
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
