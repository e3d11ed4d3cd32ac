# SPDX-License-Identifier: Apache-2.0
"""q2::requantize_by_scales on a CPU (tests/support/emulation), against the torch reference, bit by
bit."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_agrees, assert_same_bits, matrix

pytestmark = pytest.mark.usefixtures("on_cpu")

q2 = torch.ops.q2
AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"
EDEN, FORWARD = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"
SEED = torch.tensor(-1234567890123456789)


def agree(x: torch.Tensor, source: str, scheme: str, transform: str = "rht128") -> None:
    """The kernel with the reference, and both with the codes of x requantized, unless scales are
    subnormals."""
    codes, scales, global_scale = q2.quantize(x, scheme=source, rowwise=True, columnwise=False)
    args = (x, scales, global_scale, SEED, source, scheme, transform, 1)
    got = calls.launched(calls.by_scales(*args))
    assert_same_bits(got, calls.by_scales(*args)())
    if not ((scales.float() > 0) & (scales.float() <= 2.0**-6)).any():
        args = (codes, scales, global_scale, SEED, source, scheme, transform, x.shape[1], 1)
        assert_same_bits(got, calls.again(*args)())


@pytest.mark.parametrize(
    "shape, architecture",
    [(shape, HOPPER) for shape in [(256, 192), (145, 200), (130, 77), (1, 1)]]
    + [((145, 200), AMPERE), ((145, 200), BLACKWELL)],
)
def test_shapes(shape) -> None:
    """Whole tiles and parts, rows on 16 bytes and not, scales in words and not."""
    agree(matrix(*shape), FORWARD, EDEN)


@pytest.mark.parametrize(
    "scheme, room",
    [(EDEN + DEQUANTIZED, 228 * 1024), ("nvfp4_sr_pow2", 228 * 1024)]
    + [(EDEN + DEQUANTIZED, 100 * 1024), ("nvfp4_sr", 100 * 1024)],
)
def test_other_schemes(scheme) -> None:
    """With several tiles for each thread block, and where only one fits."""
    agree(matrix(300, 700), "nvfp4_pow2", scheme)


@pytest.mark.parametrize("transform", ["none", "rht16", "h32"])
def test_other_transforms(transform) -> None:
    agree(matrix(145, 200), FORWARD, "nvfp4_pow2", transform)


def test_swizzled_scales() -> None:
    for shape in ((256, 192), (145, 200)):
        agree(matrix(*shape), FORWARD + SWIZZLED, EDEN)


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_every_quotient_of_a_number_and_a_scale() -> None:
    """All 128 mantissas of bf16 by all 8 of scales, from a hundredth to the largest code. Rounding
    through f16 gives the same as the reference's single rounding."""
    numbers = torch.arange(128, 256) * 2.0 ** torch.arange(-14, -4)[:, None]
    numbers = torch.cat([numbers, -numbers]).flatten()
    scales = torch.arange(0x38, 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = numbers.bfloat16().expand(8, -1).contiguous()
    scales = scales[:, None].expand(8, x.shape[1] // 16).contiguous()
    args = (x, scales, torch.tensor(1.0), None, FORWARD, "nvfp4_pow2", "none", 1)
    assert_agrees(calls.by_scales(*args))


def test_blocks_of_zeros_and_subnormal_scales() -> None:
    x = matrix(130, 256) * torch.logspace(-9, 3, 16).repeat_interleave(16)
    x = x.bfloat16()
    x[:64, 32:64] = 0
    x[:64, 32:48] = -0.0
    scales = q2.quantize(x, scheme=FORWARD, rowwise=True, columnwise=False)[1].view(torch.uint8)
    assert ((scales > 0) & (scales < 8)).any() and (scales == 0).any()
    agree(x, FORWARD, EDEN)
    x[:, 160:] = 0  # down to 2^-96
    agree((x.float() * 2.0**-60).bfloat16(), FORWARD, EDEN)


@pytest.mark.parametrize("shape", [(0, 40), (40, 0)])
def test_empty(shape) -> None:
    agree(torch.empty(shape, dtype=torch.bfloat16), FORWARD, EDEN)
