# SPDX-License-Identifier: Apache-2.0
"""Scheme fp8: its codes against a search in float64, its scale, and its transpose."""

import math

import pytest
import torch

from q2compile.runtime_kernels.numerics.fp8 import pow2_of_amax

q2 = torch.ops.q2
# Every finite e4m3 value from 0 on, in order: byte n is value n of this list.
VALUES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def quantized(x: torch.Tensor, **directions: bool) -> list[torch.Tensor]:
    return q2.quantize(x, scheme="fp8", amax=q2.amax(x), **directions)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The bytes of the nearest e4m3 values of float64 x within 448: the even byte in a tie."""
    magnitude = x.abs().flatten()
    above = torch.searchsorted(VALUES, magnitude).clamp(1, len(VALUES) - 1)
    up, down = VALUES[above] - magnitude, magnitude - VALUES[above - 1]
    goes_up = (up < down) | ((up == down) & (above % 2 == 0))
    byte = torch.where(goes_up, above, above - 1).to(torch.uint8)
    return byte.view(x.shape) | (x.signbit().to(torch.uint8) << 7)


@pytest.mark.parametrize("largest", [448.0, 449.0, 1.75, 1.7578125, 3.0e-5, 2.0**90])
def test_every_bf16_value_gets_the_nearest_code(largest) -> None:
    """All 2^16 bf16 values that are not larger, under the scale of each of these amaxes."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = torch.where(x.abs() <= largest, x, largest)[None]
    codes, scales, scale = quantized(x, rowwise=True, columnwise=False)
    assert scale.item() == 2.0 ** math.ceil(math.log2(x.max().item() / 448))
    assert scales.shape == (0, 0)
    assert torch.equal(codes.view(torch.uint8), nearest(x.double() / scale.double()))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 1.0),
        (448.0, 1.0),
        (448.00003, 2.0),
        (224.0, 0.5),
        (2.0**-149, 2.0**-126),
        (torch.finfo(torch.float32).max, 2.0**120),
    ],
)
def test_the_scale_is_the_smallest_power_of_two_that_fits(amax, scale) -> None:
    assert pow2_of_amax(torch.tensor(amax)).item() == scale


@pytest.mark.parametrize("amax", [torch.inf, torch.nan])
def test_an_amax_that_is_not_finite_makes_the_scale_nan(amax) -> None:
    assert pow2_of_amax(torch.tensor(amax)).isnan()


@pytest.mark.parametrize("shape", [(48, 32), (33, 40), (1, 16), (0, 16), (16, 0)])
def test_directions_and_transposes_are_the_same_codes(shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    both = quantized(x, rowwise=True, columnwise=True)
    row, column = (
        quantized(x, rowwise=True, columnwise=False),
        quantized(x.t(), rowwise=True, columnwise=False),
    )
    transposed, _ = q2.transpose(row[0], row[1], "fp8", shape[1])
    for got, want in ((both[0], row[0]), (both[3], column[0]), (transposed, column[0])):
        assert got.shape == want.shape and got.shape[1] % 16 == 0
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(both[2], both[5])


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gemm_multiplies_the_dequantized_operands(dtype, bias) -> None:
    """Against float64. The tolerance is half a unit of the last place of the result's type, and
    eight of fp32 for 64 sums."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(n, 64, generator=generator) for n in (24, 40))
    added = None if bias is None else torch.randn(40, generator=generator).to(bias)
    qa, qb = (quantized(x, rowwise=True, columnwise=False) for x in (a, b))
    values = [q2.dequantize(*parts, "fp8", 64, torch.float32).double() for parts in (qa, qb)]
    want = values[0] @ values[1].t() + (0 if added is None else added.double())
    got = q2.gemm(*qa, *qb, added, "fp8", "fp8", dtype)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps
    assert (
        (got.double() - want).abs() <= unit * (want.abs() + values[0].abs() @ values[1].abs().t())
    ).all()
