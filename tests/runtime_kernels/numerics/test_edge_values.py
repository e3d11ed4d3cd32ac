# SPDX-License-Identifier: Apache-2.0
"""Every scheme on the values that break quantizers: zeros, subnormals, ties, saturation. For NaN
and Inf see test_nonfinite.py."""

import torch

from q2compile import quantize
from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from tests.support.pairwise import pairwise

NVFP4 = [name for name, s in SCHEMES.items() if s.format == "nvfp4"]
ONE_ROW = [name for name, s in SCHEMES.items() if s.block[0] == 1]


def test_zeros():
    """Trap 1: codes 0, scales 0 (e8m0 has none), a finite global scale; no 0/0."""
    for name in SCHEMES:
        q = quantize(torch.zeros(16, 64), name, seed=1)
        assert (q.codes == 0).all()
        if SCHEMES[name].format == "nvfp4":
            assert q.global_scale == 1
            assert (q.scales.float() == 0).all()
        assert (q.dequantize() == 0).all()


def test_a_zero_block_among_others():
    for name in SCHEMES:
        x = torch.randn(16, 64)
        x[:, 32:] = 0
        dequantized = quantize(x, name, seed=1).dequantize()
        assert (dequantized[:, 32:] == 0).all() and dequantized.isfinite().all()


def test_negative_zero_keeps_its_sign():
    """Trap 6: code 8 is legal, and a value of -0.0."""
    for name in SCHEMES:
        x = torch.full((16, 64), -0.0)
        x[:, 0] = 1.0
        codes = quantize(x, name, seed=1).codes
        negative_zero = 0x80 if SCHEMES[name].is_tensorwise else 0x88
        assert (codes.view(torch.uint8)[:, 1:16] == negative_zero).all()


def test_nan_of_any_payload_is_poison():
    """CUDA's own NaN is 0x7fffffff. Rounding up its bits must not give a finite value."""
    for name in SCHEMES:
        bits = torch.randn(32, 64).view(torch.int32)
        rows, width = SCHEMES[name].block
        first = 5 if SCHEMES[name].is_tensorwise else 0  # only the element itself
        width = 1 if SCHEMES[name].is_tensorwise else width
        for payload in (0x7F800001, 0x7FFFFFFF, -1):
            bits[2, 5] = payload
            nan = quantize(bits.view(torch.float32), name, seed=1).dequantize().isnan()
            assert nan[2, first : first + width].all() and nan.sum() == rows * width


def test_powers_of_two_scale_exactly():
    """Trap 2: no floor under a scale: x * 2^j has the codes of x, and its values times 2^j."""
    for name, exponent in pairwise(SCHEMES, [-100, -30, 30, 100]):
        x = torch.randn(32, 128)
        one, other = (quantize(t, name, seed=1) for t in (x, x * 2.0**exponent))
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.dequantize() * 2.0**exponent, other.dequantize())


def test_extreme_magnitudes_lose_nothing():
    for name, magnitude in pairwise(SCHEMES, [1e-30, 1e-9, 1e30]):
        x = torch.randn(64, 128, dtype=torch.float64)
        small = (x * magnitude).float()
        error = (
            (quantize(small, name, seed=1).dequantize().double() / magnitude - x).square().mean()
        )
        assert error < 0.035


def test_fp32_subnormals_do_not_become_nan():
    """Under 2^-126 precision goes, and that is all."""
    for name in SCHEMES:
        x = torch.randn(16, 64) * 2.0**-130
        dequantized = quantize(x, name, seed=1).dequantize()
        assert dequantized.isfinite().all() and dequantized.abs().max() <= 2 * x.abs().max()


def test_blocks_far_below_the_largest_have_subnormal_scales():
    """Trap 4: 2^-15 of the largest; scales of one or a few steps of 2^-9, no NaN, no Inf."""
    for name in NVFP4:
        x = torch.ones(16, 64)
        x[:, 16:] = 2.0**-15
        q = quantize(x, name, seed=1)
        scales = q.scales.float()
        assert scales[:, 1:].min() >= 0 and scales[:, 1:].max() < 2.0**-6
        assert q.dequantize()[:, 16:].max() < 2.0**-13


def test_scales_saturate_at_448():
    """Trap 3: a scale over 448 (from an amax that is too small, such as a stale one) clamps.
    torch's own cast gives NaN in some versions."""
    for name in [name for name in NVFP4 if SCHEMES[name].takes_amax]:
        q = quantize(torch.randn(16, 64) * 8, name, seed=1, amax=torch.tensor(1.0))
        assert q.scales.float().max() == 448
        assert q.dequantize().isfinite().all()


def test_ties_go_to_even_codes():
    for name in ["nvfp4", "nvfp4_pow2", "nvfp4_16x16", "mxfp4_rtn"]:
        ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 8)
        x = torch.cat([ties, -ties]).expand(16, 128) * 2.0**-20
        # An amax for which the exact global scale is a power of two: with others there are no ties.
        amax = torch.tensor(6 * 448 * 2.0**-20) if SCHEMES[name].takes_amax else None
        q = quantize(x, name, amax=amax)
        assert decode_e2m1(q.codes)[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


def test_16_bit_inputs_are_their_fp32_values():
    for name, dtype in pairwise(SCHEMES, [torch.bfloat16, torch.float16]):
        x = torch.randn(16, 64).to(dtype)
        one, other = quantize(x, name, seed=1), quantize(x.float(), name, seed=1)
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.dequantize(), other.dequantize())


def test_any_strides():
    """Trap 13: transposed, sliced and stride-0 tensors come out of autograd."""
    for name in SCHEMES:
        x = torch.randn(64, 48)
        for view in (x.t(), x[::2, 3:35], x[:1].expand(16, 48), torch.ones(()).expand(16, 48)):
            one, other = quantize(view, name, seed=1), quantize(view.contiguous(), name, seed=1)
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.scales.view(torch.uint8), other.scales.view(torch.uint8))


SHAPES = [(0, 64), (64, 0), (0, 0), (1, 1), (33, 7), (7, 130)]


def test_any_shape():
    """Trap 14 and 10: no tokens, an odd number of them, a contraction of no whole block."""
    for name, shape, transpose in pairwise(ONE_ROW, SHAPES, [False, True]):
        x = torch.randn(shape)
        for transform in ("none", "rht128"):
            q = quantize(x, name, transform=transform, transpose=transpose, seed=1)
            assert q.dequantize().shape == shape
            assert q.codes.is_contiguous() and q.scales.is_contiguous()
            if x.numel() == 0:
                assert q.global_scale == 1 / SCHEMES[name].shrink
