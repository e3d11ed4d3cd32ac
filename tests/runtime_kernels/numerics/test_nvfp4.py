# SPDX-License-Identifier: Apache-2.0
"""NVFP4's rounding rules, block by block."""

import pytest
import torch

from q2compile import quantize
from q2compile.runtime_kernels.numerics import nvfp4
from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.schemes import MS_EDEN_CLIP, SCHEMES, get_scheme
from tests.support.oracle import E2M1, E4M3, nearest

NVFP4 = [name for name, s in SCHEMES.items() if s.format == "nvfp4"]
NEAREST = [name for name in NVFP4 if SCHEMES[name].rounding == "rtn"]


def parts(q) -> tuple[torch.Tensor, torch.Tensor, float]:
    """e2m1 values [M, B, 16], the scale of each row's part of a block [M, B, 1], global scale, all
    float64."""
    values = decode_e2m1(q.codes).double().unflatten(1, (-1, 16))
    scales = q.scales.double()
    if "16x16" in q.scheme:
        scales = scales.repeat_interleave(16, 0)[: values.shape[0]]
    return values, scales.unsqueeze(2), q.global_scale.double().item()


def test_every_code_is_the_nearest():
    """Given its scale, no other code is nearer in float64, except for ties that fp32 rounding
    makes.

    Over 2^12 in magnitude: 2^14 below the largest a _pow2 scheme's scale, found after the codes, is
    a subnormal of e4m3 and off by up to half of itself (nvfp4.py).
    """
    for name in NEAREST:
        x = torch.randn(48, 256).double() * torch.logspace(-1.8, 1.8, 48)[:, None]
        values, scales, g = parts(quantize(x.float(), name))
        target = x.float().double().unflatten(1, (-1, 16))
        best = nearest(target / (scales * g), E2M1) * scales * g
        error, least = (target - values * scales * g).abs(), (target - best).abs()
        assert (error <= least * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_scales_of_the_exact_rule(name):
    x = torch.randn(64, 256)
    q = quantize(x, name)
    g = (x.abs().max() / (6 * 448)).item()
    assert q.global_scale.item() == pytest.approx(g, rel=1e-7)
    rows = SCHEMES[name].block[0]
    largest = x.abs().view(64 // rows, rows, 16, 16).amax((1, 3))
    assert torch.equal(q.scales.double(), nearest(largest / 6 / q.global_scale, E4M3))
    assert q.scales.float().max() == 448


@pytest.mark.parametrize("name", ["nvfp4_46", "nvfp4_46_pow2", "nvfp4_16x16_46"])
def test_four_over_six_keeps_the_better_scale(name):
    """Both candidates by their definition in float64; the chosen one has the smaller error."""
    x = torch.randn(64, 512)
    scheme = get_scheme(name)
    q = quantize(x, name)
    values, scales, g = parts(q)
    target = x.double().unflatten(1, (-1, 16))

    def error(dequantized: torch.Tensor) -> torch.Tensor:
        return (
            (target - dequantized)
            .square()
            .sum(2)
            .view(64 // scheme.block[0], scheme.block[0], 32)
            .sum(1)
        )

    candidates, off = [], 0.0
    for vmax in (6.0, 4.0):
        largest = target.abs().amax(2)
        if scheme.block[0] > 1:
            largest = largest.view(4, 16, 32).amax(1).repeat_interleave(16, 0)
        scale = nearest(largest / vmax / g, E4M3).unsqueeze(2) * g
        candidates.append(error(nearest(target / scale, E2M1) * scale))
        # In units of the scale an element's error is rounded to a multiple of 2^-14.
        off += scale.squeeze(2).square()[:: scheme.block[0]] * (16 * scheme.block[0] * 2**-15)
    six, four = candidates
    kept, better = error(values * scales * g), torch.minimum(six, four)
    assert (kept - better <= off).all()
    assert (kept <= better * (1 + 1e-12)).double().mean() > 0.99, "sums so near are rare"
    assert 0.02 < (four < six).double().mean() < 0.6, "both candidates are in use"


@pytest.mark.parametrize("name", ["nvfp4_search", "nvfp4_search_pow2"])
def test_scale_search_keeps_the_best_of_its_steps(name):
    """All candidates by their definition in float64: scales some e4m3 steps from the one for 6."""
    x = torch.randn(64, 512)
    values, scales, g = parts(quantize(x, name))
    target = x.double().unflatten(1, (-1, 16))
    first = nearest(target.abs().amax(2, keepdim=True) / 6 / g, E4M3)
    place = torch.searchsorted(E4M3, first)
    errors, off = [], 0.0
    for step in get_scheme(name).steps:
        scale = E4M3[place + step] * g
        errors.append((target - nearest(target / scale, E2M1) * scale).square().sum(2))
        # In units of the scale an element's error is rounded to a multiple of 2^-14.
        off = torch.maximum(torch.as_tensor(off), scale.squeeze(2).square() * 16 * 2**-14)
    kept = (target - values * scales * g).square().sum(2)
    best, taken = torch.stack(errors).min(0)
    assert (kept - best <= off).all()
    assert (kept <= best * (1 + 1e-12)).double().mean() > 0.99, "sums so near are rare"
    assert (taken.flatten().bincount(minlength=5) / taken.numel() > 0.05).all(), "all are in use"


def test_scale_search_in_a_tie_keeps_the_first_step():
    """All of a block on the grid of the scale for 6: no error, and none with others at most."""
    x = torch.tensor([[6.0, 3.0, 1.0, 0.5] * 4])
    q = quantize(x, "nvfp4_search_pow2")
    assert torch.equal(q.dequantize(), x)
    assert q.scales.float() * q.global_scale == 1.0


@pytest.mark.parametrize("name", ["nvfp4_search", "nvfp4_search_pow2"])
def test_scale_search_stays_on_the_grid_of_scales(name):
    """Zeros, the smallest normal fp32 and the largest scale have a neighbor on one side only."""
    x = torch.zeros(4, 32)
    x[0, :16] = torch.linspace(0, 448 * 6, 16)
    x[1, :16] = torch.linspace(-1, 1, 16) * 6 * 2.0**-126
    x[2, :16] = torch.linspace(-1, 1, 16) * 6 * 2.0**-9
    q = quantize(x, name)
    assert q.scales.float().isfinite().all()
    assert torch.equal(q.dequantize()[3], x[3]) and torch.equal(q.dequantize()[:, 16:], x[:, 16:])
    assert (q.dequantize() - x).abs().max() <= 448


def test_four_over_six_in_a_tie_keeps_six():
    """12 and 6 are exact as 6*2 and 3*2, and as 4*3 and 2*3."""
    x = torch.tensor([[12.0, 6.0] + [0.0] * 14])
    assert quantize(x, "nvfp4_46_pow2").codes[0, 0] == 0x57  # 6 then 3, not 4 then 2


@pytest.mark.parametrize("name", [n for n in NVFP4 if n.endswith("_pow2")])
def test_global_scale_is_the_smallest_power_of_two(name):
    x = torch.randn(64, 256) * 3
    q = quantize(x, name, seed=1)
    fraction, _ = torch.frexp(q.global_scale)
    assert fraction == 0.5
    # SR of the scales may go up one step from below the cap, never over it.
    largest = q.scales.float().max()
    assert SCHEMES[name].cap / 2 * 0.9 < largest <= SCHEMES[name].cap


def test_ms_eden_projects_exactly_before_its_scales_are_rounded(monkeypatch):
    """<y, y_hat> = <y, y> in every block, y_hat = code * p * S; p * S is left unrounded."""
    unrounded = []

    def remember(scales: torch.Tensor, random_bits: torch.Tensor) -> torch.Tensor:
        unrounded.append(scales)
        return scales.to(torch.float8_e4m3fn)

    monkeypatch.setattr(nvfp4, "stochastic_e4m3", remember)
    x = torch.randn(32, 256) * torch.logspace(-4, 4, 32)[:, None]
    q = quantize(x, "nvfp4_ms_eden", seed=1)
    values, _, g = parts(q)
    estimate = values * unrounded[0].double().unsqueeze(2) * g
    target = x.double().unflatten(1, (-1, 16))
    projection, norm = (target * estimate).sum(2), target.square().sum(2)
    # Each of the 16 products loses less than 2^-13, and their sum is at least 30: the largest
    # element comes out above 5.5 times the scale.
    torch.testing.assert_close(projection, norm, rtol=16 * 2**-13 / 30, atol=0)


def test_ms_eden_clips_at_its_clipping_point():
    """A block's maximum is mapped to s_clip, then to 4 bits: at most 1/16 above, never to 7."""
    assert pytest.approx(6.0721, abs=1e-4) == MS_EDEN_CLIP
    assert MS_EDEN_CLIP * 17 / 16 < 7


def test_16x16_blocks_of_ragged_rows():
    for name in NVFP4:
        x = torch.randn(21, 40)
        q = quantize(x, name, seed=1)
        rows = -(-21 // SCHEMES[name].block[0])
        assert q.codes.shape == (21, 24) and q.scales.shape == (rows, 3)
        assert q.codes.is_contiguous() and q.scales.is_contiguous()
        padding = decode_e2m1(q.codes)[:, 40:]
        assert (padding == 0).all()
