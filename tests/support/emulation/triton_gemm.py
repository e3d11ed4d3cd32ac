# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton fp4 GEMMs under Triton's interpreter, which must be chosen before Triton is
imported: a program of its own, for tests/runtime_kernels/cuda/test_triton_gemm.py.

    TRITON_INTERPRET=1 python -m tests.support.emulation.triton_gemm

The interpreter has no dot_scaled, so this file has one, which takes the loaded operands.
"""

import itertools
from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda.gemm import triton_grouped_kernel as grouped
from q2compile.runtime_kernels.cuda.gemm import triton_kernel as gemm
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.gemm import Factor
from tests.support.pairwise import covering

assert runtime_kernels  # importing it registers the ops
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])


def decoded(codes, scales, dim: int) -> torch.Tensor:
    """[rows, K] of packed codes, two along dim (1: [rows, K/2], 0: [K/2, rows]), and of scales
    [rows, blocks]: e4m3 for blocks of 16, e8m0 for 32."""
    low, high = torch.from_numpy(codes & 15), torch.from_numpy(codes >> 4)
    values = GRID[torch.stack([low, high], dim + 1).flatten(dim, dim + 1).int()]
    values = values if dim == 1 else values.t()
    width = values.shape[1] // scales.shape[1]
    kind = torch.float8_e4m3fn if width == 16 else torch.float8_e8m0fnu
    scale = torch.from_numpy(scales.copy()).view(kind).float()
    return values * scale.repeat_interleave(width, 1)


def dot_scaled(self, a, a_scale, a_type, b, b_scale, b_type, sums, *rest):
    left = decoded(a.handle.data, a_scale.handle.data, 1)
    right = decoded(b.handle.data, b_scale.handle.data, 0)
    data = sums.handle.data + (left @ right.t()).numpy()
    return tl.tensor(interpreter.TensorHandle(data, sums.handle.dtype), sums.type)


def with_numpy_2_4(patch_tensor):
    """Triton 3.6's interpreter converts an array of shape [1] to int, which is an error in numpy
    2.4."""

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def operand(rows: int, k: int, scheme: str) -> Factor:
    """An operand with plain scales."""
    x = torch.randn(rows, k)
    amax = x.abs().amax() if get_scheme(scheme).takes_amax else None
    made = torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)
    return Factor(*made, get_scheme(scheme))


def swizzled(factor: Factor) -> Factor:
    scales = factor.scales.view(torch.uint8).repeat_interleave(factor.spec.block[0], 0)
    scales = scales[: factor.codes.shape[0]].view(factor.scales.dtype)
    return factor._replace(scales=swizzle_32x4x4(scales))


def check(m: int, n: int, k: int, schemes: tuple[str, str], biased: bool, tile: gemm.Tile) -> None:
    a, b = (operand(rows, k, s) for rows, s in zip((m, n), schemes, strict=True))
    bias = torch.randn(n) if biased else None
    got = gemm.gemm_fp4(swizzled(a), swizzled(b), bias, torch.float32, tile)
    want = torch.ops.q2.gemm(*a[:3], *b[:3], bias, *schemes, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_unrotated(m: int, n: int, k: int, scheme: str, dtype, tile: gemm.Tile) -> None:
    """Bit for bit the results of the two ops for the kernel's product, NaNs included."""
    a, b = (swizzled(operand(rows, k, scheme)) for rows in (m, n))
    a[2].fill_(0.75)
    if k > 100:
        b[1].view(torch.uint8)[:1] = 255  # a scale that is NaN in both formats: a column of NaNs
    mask = torch.randint(0, 256, (m, n // 8), dtype=torch.uint8)
    mask[:, : n // 16] |= torch.randint(0, 256, (m, n // 16), dtype=torch.uint8)
    plain = gemm.gemm_fp4(a, b, None, dtype, tile)
    want = torch.ops.q2.masked_unrotate(plain, mask, "h32")
    unrotation = gemm.Unrotation(mask, get_transform("h32").norm)
    got = gemm.gemm_fp4(a, b, None, dtype, tile, unrotation)
    assert torch.equal(got.isnan(), want.isnan())
    assert got.isnan().any() == (k > 100) and not got.isnan().all()
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


# Ends of groups: empty ones at both ends and between, of one row, of more than a tile; rows of no
# group, and a tile's raw scale of nothing else. Where they are contracted, whole chunks.
ROWS = [([0, 1, 4, 4, 140, 180, 180], 200), ([0, 0], 150), ([130], 130)]
CHUNKS = [([0, 128, 128, 512, 640], 768), ([128], 128)]


def check_grouped(
    gemm_name: str, ends: list[int], rows: int, k: int, n: int, schemes, tile: gemm.Tile
) -> None:
    """Weights of [n, k] in fprop and wgrad, of [k, n] in dgrad."""
    groups, offs = len(ends), torch.tensor(ends, dtype=torch.int32)
    sizes = {
        "fprop": ((rows, k), (groups * n, k)),
        "dgrad": ((rows, k), (n, groups * k)),
        "wgrad": ((k, rows), (n, rows)),
    }[gemm_name]
    a, b = (operand(*size, s) for size, s in zip(sizes, schemes, strict=True))
    got = grouped.grouped_gemm_fp4(a, b, offs, gemm_name, torch.float32, tile)
    want = torch.ops.q2.grouped_gemm(*a[:3], *b[:3], offs, *schemes, gemm_name, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def grouped_cases() -> list[tuple]:
    nvfp4 = [("nvfp4_46_pow2", s) for s in ("nvfp4_46", "nvfp4_16x16")]
    mxfp4 = [("mxfp4_rtn", "mxfp4_rtn34")]
    tiles = [tile for generation in gemm._TILES.values() for tile in generation]
    cases = [
        *itertools.product(["fprop"], ROWS, [(272, 40)], nvfp4),
        *itertools.product(["fprop", "dgrad"], ROWS[:1], [(128, 136)], nvfp4 + mxfp4),
        *itertools.product(["wgrad"], CHUNKS[:1], [(130, 40)], nvfp4[:1] + mxfp4),
        ("wgrad", CHUNKS[1], (40, 300), nvfp4[0]),
    ]
    return [
        (name, *groups, *size, s, tile)
        for name, groups, size, s, tile in covering(
            (*case, tile) for case in cases for tile in tiles
        )
    ]


def unrotated(tiles: list[Any]) -> None:
    """Products whose sums are rotated back."""
    shapes = [(128, 256, 256), (200, 160, 288), (1, 32, 32)]
    # The interpreter truncates to bf16.
    results = [("nvfp4_46", torch.float32), ("mxfp4_rtn34", torch.float16)]
    # Any two of shape, result and tile meet.
    cases = [
        (shape, results[(i + t) % 2], tile)
        for (i, shape), (t, tile) in itertools.product(enumerate(shapes), enumerate(tiles))
    ]
    cases.append(((1100, 288, 96), results[1], tiles[0]))  # groups of tile rows
    for shape, result, tile in cases:
        check_unrotated(*shape, *result, tile)
    print(f"{len(cases)} products, rotated back, agree with the reference")


def plain(tiles: list[Any]) -> None:
    shapes = [(128, 128, 256), (200, 136, 272), (1, 7, 16), (1200, 130, 48), (130, 300, 576)]
    schemes = [("nvfp4_46_pow2", s) for s in ("nvfp4_46_pow2", "nvfp4_16x16", "nvfp4_46")]
    schemes += [("mxfp4_rtn", "mxfp4_rtn34")]
    # Any two of shape, schemes, bias and tile meet.
    cases = [
        (*shapes[i], schemes[j], bool((i + j // 2) % 2), tiles[(i + j) % 4])
        for i, j in itertools.product(range(5), range(4))
    ]
    for case in cases:
        check(*case)
    print(f"{len(cases)} products agree with the reference")


def main() -> None:
    TritonSemantic.dot_scaled = dot_scaled
    interpreter._patch_lang_tensor = with_numpy_2_4(interpreter._patch_lang_tensor)
    torch.manual_seed(0)
    tiles = [tile for generation in gemm._TILES.values() for tile in generation]
    plain(tiles)
    unrotated(tiles)
    cases = grouped_cases()
    for case in cases:
        check_grouped(*case)
    print(f"{len(cases)} grouped products agree with the reference")


if __name__ == "__main__":
    main()
