# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transforms."""

import pytest
import torch

from q2compile import quantize
from q2compile.runtime_kernels.numerics import transforms
from q2compile.runtime_kernels.numerics.layout import Tiling
from q2compile.runtime_kernels.numerics.quantize_tiles import rotate_tiles, rotate_tiles_back
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS, get_transform, signs_of

ROTATIONS = [t for t in TRANSFORMS.values() if t.size > 1]
SEED = torch.tensor(11)


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), h)
    return h


def rotated(x: torch.Tensor, rotation: transforms.Transform, seed=SEED) -> torch.Tensor:
    tiling = Tiling.of(x, rotation.size, transpose=False)
    return tiling.join(rotate_tiles(tiling.cut(x), rotation, seed).mul_(rotation.norm))


@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda t: t.name)
def test_is_h_of_x_times_d(rotation):
    """Trap 8: x*D first, then H; the other order does nothing but change signs."""
    x = torch.randn(5, 2 * rotation.size)
    signs = signs_of(rotation, SEED, x.device)
    signs = torch.ones(rotation.size) if signs is None else signs
    chunks = x.double().view(5, 2, rotation.size) * signs
    expected = chunks @ sylvester(rotation.size) / rotation.size**0.5
    # pairwise fp32 sums of up to 128 terms of order 1
    torch.testing.assert_close(rotated(x, rotation).double(), expected.view(5, -1), **close(1e-5))


def close(tolerance: float) -> dict[str, float]:
    return {"atol": tolerance, "rtol": 0.0}


def test_butterfly_order_is_the_contract():
    """h = 1, 2, 4: ((a+b)+(c+d)) in fp32, whatever the values."""
    x = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0] + [0.0] * 12).view(1, 16, 1)
    y = transforms.hadamard(x.clone()).flatten()
    # (2^24 + 1) + (-2^24 + 1) in fp32: 2^24 + 1 is a tie and goes to 2^24; -2^24 + 1 is exact
    assert y[0] == 1.0


@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda t: t.name)
def test_rotated_zeros_are_positive(rotation):
    """Chunks of -0, of zeros of either sign, and of elements that cancel. Most sums are 0."""
    x = torch.zeros(64, 2 * rotation.size)
    x[::2] = -0.0
    x[1::4, ::3] = -0.0
    x[::8, 2:] = 1.0
    y = rotated(x, rotation)
    assert (y == 0).float().mean() > 2 / 3 and not y[y == 0].signbit().any()


@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda t: t.name)
def test_back_again(rotation):
    x = torch.randn(3, rotation.size)
    tiling = Tiling.of(x, rotation.size, transpose=False)
    back = tiling.join(rotate_tiles_back(tiling.cut(rotated(x, rotation)), rotation, SEED))
    torch.testing.assert_close(back, x, **close(1e-5))


def test_the_product_of_two_rotated_operands_is_theirs():
    a, b = torch.randn(4, 256), torch.randn(6, 256)
    rotation = get_transform("rht128")
    product = rotated(a, rotation) @ rotated(b, rotation).t()
    torch.testing.assert_close(product, a @ b.t(), **close(1e-4))


def test_other_signs_on_the_second_operand_make_noise():
    """Trap 7: swapping the seeds of dgrad and wgrad is silent; the product is then uncorrelated."""
    a, b = torch.randn(64, 256), torch.randn(64, 256)
    rotation = get_transform("rht128")
    product = rotated(a, rotation) @ rotated(b, rotation, torch.tensor(12)).t()
    cosine = torch.cosine_similarity(product.flatten(), (a @ b.t()).flatten(), 0)
    assert cosine.abs() < 0.2


def test_signs_are_half_negative_and_drawn_from_all_of_the_seed():
    rotation = get_transform("rht128")
    drawn = torch.stack([signs_of(rotation, torch.tensor(s << 40), SEED.device) for s in range(64)])
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert drawn.mean().abs() < 5 / (64 * 128) ** 0.5
    assert len(drawn.unique(dim=0)) == 64


def test_fixed_signs_need_no_seed_and_never_change():
    rotation = get_transform("rht16_fixed")
    signs = signs_of(rotation, None, SEED.device)
    assert torch.equal(signs, signs_of(rotation, SEED, SEED.device))
    # Written out, since runs in progress depend on them: the low 16 bits of word 0 are 0x73E5.
    assert sum(1 << i for i, s in enumerate(signs.tolist()) if s < 0) == 0x73E5


@pytest.mark.parametrize("columns", [1, 17, 130])
def test_padding_is_harmless(columns):
    """Trap 10: zero-padded chunks on both operands leave the product alone."""
    a, b = torch.randn(4, columns), torch.randn(6, columns)
    rotation = get_transform("rht128")
    product = rotated(a, rotation) @ rotated(b, rotation).t()
    torch.testing.assert_close(product, a @ b.t(), **close(1e-4))


def test_a_rotation_never_crosses_a_row():
    x = torch.zeros(4, 130)
    x[1] = torch.randn(130)
    codes = quantize(x, "nvfp4_46_pow2", transform="rht128", seed=1).dequantize(rotate_back=False)
    assert (codes[[0, 2, 3]] == 0).all() and (codes[1] != 0).any()


def test_permuting_tokens_changes_the_codes_of_wgrad():
    """Blocks of wgrad lie along the tokens: other neighbors, other scales, other codes."""
    x = torch.randn(64, 32)
    order = torch.arange(64).roll(8)
    one = quantize(x, "nvfp4", transpose=True).dequantize()[order]
    other = quantize(x[order], "nvfp4", transpose=True).dequantize()
    assert not torch.equal(one, other)
    along_rows = quantize(x, "nvfp4").dequantize()[order]
    assert torch.equal(along_rows, quantize(x[order], "nvfp4").dequantize())


def test_unknown_transform_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'rht128'"):
        get_transform("rht-128")
