# SPDX-License-Identifier: Apache-2.0
"""Packing, tiles, and the swizzle."""

import pytest
import torch

from q2compile.runtime_kernels.numerics import layout, swizzle


@pytest.mark.parametrize(("rows", "contraction"), [(5, 64), (5, 40), (1, 1), (0, 40), (5, 0)])
@pytest.mark.parametrize("transpose", [False, True])
def test_tiles_and_back(rows, contraction, transpose):
    x = torch.randn((contraction, rows) if transpose else (rows, contraction))
    tiling = layout.Tiling.of(x, 32, transpose=transpose)
    tiles = tiling.cut(x)
    assert tiles.shape[1] == 32 and tiles.is_contiguous()
    padded = tiling.join(tiles)
    assert padded.is_contiguous() and padded.shape == (rows, -(-contraction // 32) * 32)
    assert torch.equal(padded[:, :contraction], x.t() if transpose else x)
    assert (padded[:, contraction:] == 0).all()


def test_a_tile_never_crosses_a_row():
    """Trap 10: each column of a tile holds elements of one row only."""
    row_of = torch.arange(7.0)[:, None].expand(7, 40) + 1
    tiles = layout.Tiling.of(row_of, 16, transpose=False).cut(row_of)
    for column in tiles.flatten(0, 1).unbind(1):
        assert len(set(column.tolist()) - {0.0}) == 1


def test_pack_and_unpack():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16, 1)
    packed = layout.pack(codes).flatten()
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert layout.unpack(packed.view(1, 8)).tolist() == [list(range(16))]


def test_pack_bits_little_first():
    bits = torch.zeros(1, 16, 1, dtype=torch.bool)
    bits[0, [0, 3, 15]] = True
    packed = layout.pack_bits(bits).flatten()
    assert packed.tolist() == [0b1001, 0b10000000]
    assert torch.equal(layout.unpack_bits(packed.view(1, 2)), bits.view(1, 16))


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 8), (130, 9), (1, 1), (0, 4)])
def test_swizzle_by_its_formula(rows, blocks):
    scales = torch.randint(0, 127, (rows, blocks), dtype=torch.uint8)
    out = swizzle.swizzle_32x4x4(scales.view(torch.float8_e4m3fn))
    assert out.dtype == torch.float8_e4m3fn
    expected = torch.zeros_like(out.view(torch.uint8))
    for r in range(rows):
        for b in range(blocks):
            tile = (r // 128) * -(-blocks // 4) + b // 4
            at = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + b % 4
            expected[at] = scales[r, b]
    assert torch.equal(out.view(torch.uint8), expected)
    back = swizzle.unswizzle_32x4x4(out, rows, blocks)
    assert torch.equal(back.view(torch.uint8), scales)


def test_swizzle_says_what_it_takes():
    with pytest.raises(ValueError, match="matrix of 8-bit scales, got torch.float32"):
        swizzle.swizzle_32x4x4(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"fill 512 bytes, got 8"):
        swizzle.unswizzle_32x4x4(torch.zeros(8, dtype=torch.uint8), 4, 4)
