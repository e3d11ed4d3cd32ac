# SPDX-License-Identifier: Apache-2.0
"""Rounding to e2m1, e4m3, e8m0 and to 4 significant bits, against the formats' definitions."""

import pytest
import torch

from q2compile.runtime_kernels.numerics import formats, philox
from tests.support.oracle import E2M1, E4M3, nearest, neighbors

# Every bf16 number in e2m1's range and a little above, both signs: ties and all.
EVERY_BF16 = torch.arange(0x4110, dtype=torch.int16).view(torch.bfloat16).float()
EVERY_BF16 = torch.cat([EVERY_BF16, -EVERY_BF16])


def test_e2m1_nearest_of_every_bf16():
    rounded = formats.round_e2m1(EVERY_BF16)
    assert torch.equal(rounded.double(), nearest(EVERY_BF16, E2M1))
    assert torch.equal(rounded.signbit(), EVERY_BF16.signbit())  # -0.1 becomes -0.0


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    just_above = torch.nextafter(ties, torch.tensor(9.0))
    assert formats.round_e2m1(just_above).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


def test_e2m1_saturates():
    x = torch.tensor([6.0, 6.4, 7.0, 7.5, 1e9, 3e38])
    assert formats.round_e2m1(x).tolist() == [6.0] * 6
    assert formats.round_e2m1(-x).tolist() == [-6.0] * 6


def test_codes_are_sign_then_index():
    values = torch.cat([E2M1, -E2M1]).float()
    codes = formats.encode_e2m1(values)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == list(range(16))  # -0.0 is code 8


def test_decode_takes_the_low_nibble_first():
    codes = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)
    assert formats.decode_e2m1(codes).tolist() == [[0.5, 1.0, -0.0, -6.0]]


def test_e4m3_grid_of_the_oracle_is_torchs():
    bits = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(bits.view(torch.float8_e4m3fn).double(), E4M3)


def test_e4m3_nearest():
    """Also in the subnormals, and saturating: torch's bare cast gives NaN over 464 in 2.11."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    x = torch.cat([E4M3, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)]).float()
    x = torch.cat([x, torch.tensor([449.0, 464.0, 465.0, 1e30])])
    assert torch.equal(formats.nearest_e4m3(x).double(), nearest(x, E4M3))


@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-7, 1.0, 200.0])
def test_e4m3_stochastic_is_unbiased_also_in_the_subnormals(scale):
    """Trap 4: steps under 2^-6 are all 2^-9, and zero is one of them."""
    x = torch.rand(200, generator=torch.Generator().manual_seed(1)) * scale
    draws = 4096
    random_bits = philox.words(
        torch.tensor(5), draws * 200, rng_offset=0, purpose=philox.RANDOM_BITS
    )
    rounded = formats.stochastic_e4m3(x.expand(draws, -1), random_bits.view(draws, 200)).double()
    below, above = neighbors(x, E4M3)
    assert ((rounded == below) | (rounded == above)).all()
    # 5 standard deviations of a mean of two-point draws
    deviation = (above - below) * 0.5 / draws**0.5
    assert ((rounded.mean(0) - x).abs() <= 5 * deviation).all()


def test_stochastic_rounding_leaves_grid_points_alone():
    random_bits = torch.tensor([0, 2**32 - 1]).repeat_interleave(127)
    x = E4M3.float().repeat(2)
    assert torch.equal(formats.stochastic_e4m3(x, random_bits).double(), E4M3.repeat(2))
    codes = torch.cat([E2M1, -E2M1]).float()
    for random in (0, 2**22 - 1):
        assert torch.equal(formats.stochastic_e2m1(codes, torch.tensor(random)), codes)


def test_e2m1_stochastic_is_unbiased_over_all_its_random_bits():
    """The mean is x, within 2^-23 of a step, since a fraction has 22 bits. From 1 on an fp32 has no
    more bits, and the mean is exactly x."""
    for x in torch.tensor([2.0**-24, 0.49999997, 0.5 + 2.0**-22, 0.9999999, 1.9999999, 3.1, 5.99]):
        below, above = neighbors(x, E2M1)
        for sign in (1, -1):
            rounded = formats.stochastic_e2m1(sign * x.expand(2**22), torch.arange(2**22)).double()
            assert ((rounded == sign * below) | (rounded == sign * above)).all()
            error = (sign * rounded.mean() - x.double()).abs()
            assert error <= (2.0**-23 * (above - below) if x < 1 else 0)


def test_e2m1_stochastic_saturates():
    x = torch.tensor([6.0, 6.5, 8.0, 1e30])
    for random in (0, 2**22 - 1):
        assert formats.stochastic_e2m1(-x, torch.tensor(random)).tolist() == [-6.0] * 4


def test_stochastic_rounding_uses_all_32_random_bits():
    """x = 1 + 2^-20 goes up to 1.125 for the random bits under 2^-17 * 2^32, and for no other."""
    x = torch.tensor([1 + 2.0**-20]).expand(2)
    random_bits = torch.tensor([2**15 - 1, 2**15])
    assert formats.stochastic_e4m3(x, random_bits).float().tolist() == [1.125, 1.0]


def test_keep_4_bits():
    x = torch.tensor([1.0, 1.0625, 1.1875, 1.06251, 1.9, 1.99, 3e-39, 7e37, 0.0])
    kept = formats.keep_4_bits(x)
    assert kept[:6].tolist() == [1.0, 1.0, 1.25, 1.125, 1.875, 2.0]  # ties to even; 1.99 carries
    assert kept[8] == 0
    mantissa, _ = torch.frexp(kept[6:8])
    assert torch.equal(mantissa * 16, (mantissa * 16).round())
    assert formats.keep_4_bits(torch.tensor([torch.inf]))[0] == torch.inf


def test_exponent_and_power():
    x = torch.tensor([0.0, 1e-40, 2.0**-126, 0.99, 1.0, 1.5, 2.0, 3e38])
    assert formats.exponent_of(x).tolist() == [-127, -127, -126, -1, 0, 0, 1, 127]
    exponents = torch.arange(-126, 128)
    assert formats.power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]
