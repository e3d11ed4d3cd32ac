# SPDX-License-Identifier: Apache-2.0
"""Each scheme on N(0,1): the papers' quadratic errors, bias, independent random bits."""

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import paper_tables

from q2compile import quantize
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, get_scheme
from tests.support.oracle import relative_error

STOCHASTIC = [name for name, s in SCHEMES.items() if s.stochastic]


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@functools.cache
def measured_error(scheme: str) -> float:
    if SCHEMES[scheme].format == "nvfp4":
        x = gaussian(1024, 2048)
        return relative_error(quantize(x, scheme, seed=1).dequantize(), x)
    # Scales are powers of two: averaged over one octave of tensor scales, log-uniform.
    errors = []
    for i in range(8):
        x = gaussian(512, 2048, seed=i) * 2 ** (i / 8 + 1 / 16)
        errors.append(relative_error(quantize(x, scheme, seed=1).dequantize(), x))
    return sum(errors) / len(errors)


@pytest.mark.parametrize("scheme", paper_tables.ERRORS)
def test_quadratic_error_is_the_papers(scheme):
    """Within 1%, or 2% where the paper prints two digits."""
    figure = paper_tables.ERRORS[scheme]
    tolerance = 0.02 if figure < 10 else 0.01
    assert measured_error(scheme) * 1e3 == pytest.approx(figure, rel=tolerance)


@pytest.mark.parametrize("scheme", paper_tables.BITS)
def test_effective_bits_are_the_papers(scheme):
    # A tensor's amax decides where the e4m3 scales fall: +-0.002 between draws of 2^21 elements.
    bits = -math.log2(measured_error(scheme)) / 2
    assert bits == pytest.approx(paper_tables.BITS[scheme], abs=0.004)


@pytest.mark.parametrize("scheme", [n for n in SCHEMES if n.endswith("_pow2")])
def test_a_power_of_two_costs_nothing(scheme):
    """The error with a global scale found afterwards is that with the exact one, within 1%."""
    exact = measured_error(scheme.removesuffix("_pow2"))
    assert measured_error(scheme) == pytest.approx(exact, rel=0.01)


def error_of_mean(scheme: str, draws: int, x: torch.Tensor) -> float:
    """Relative quadratic error of the mean of independent draws: x is repeated as rows, and no two
    rows share random bits."""
    estimate = quantize(x.repeat(draws, 1), scheme, seed=3).dequantize()
    return relative_error(estimate.view(draws, *x.shape).double().mean(0), x)


@pytest.mark.parametrize("scheme", ["nvfp4_sr", "nvfp4_sr_pow2", "mxfp4_sr"])
def test_stochastic_rounding_is_unbiased(scheme):
    x = gaussian(16, 256)
    one, many = error_of_mean(scheme, 4, x), error_of_mean(scheme, 1024, x)
    # 256 times the draws; 4096 samples of the error, each chi-square: +-5%
    assert one / many == pytest.approx(256, rel=0.15)


def test_4_6_makes_stochastic_rounding_biased():
    """4/6 keeps the candidate with the smaller error, so its draws are biased: never in the
    backward."""
    x = gaussian(16, 256)
    one, many = (error_of_mean("nvfp4_sr_46", draws, x) for draws in (4, 1024))
    assert one / many < 64


def test_without_headroom_stochastic_rounding_clips_and_is_biased():
    x = gaussian(16, 256)
    one, many = (error_of_mean("nvfp4_sr_clip", draws, x) for draws in (4, 1024))
    assert one / many < 64


def mean_over_rotations(scheme: str, transform: str, draws: int, x: torch.Tensor) -> float:
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(draws):
        total += quantize(x, scheme, transform=transform, seed=seed).dequantize().double()
    return relative_error(total / draws, x)


def test_ms_eden_is_unbiased_over_rotations():
    x = gaussian(32, 256)
    one, many = (mean_over_rotations("nvfp4_ms_eden_pow2", "rht128", n, x) for n in (2, 128))
    assert one / many == pytest.approx(64, rel=0.15)


def test_ms_eden_without_new_signs_is_biased():
    """One fixed rotation leaves the codes as they are: only the scales' random bits are
    averaged."""
    x = gaussian(32, 256)
    one, many = (mean_over_rotations("nvfp4_ms_eden_pow2", "rht128_fixed", n, x) for n in (2, 128))
    assert one / many < 4


@pytest.mark.parametrize("scheme", STOCHASTIC)
def test_random_bits_differ_by_row_by_rng_offset_and_by_seed(scheme):
    row = gaussian(1, 512)
    x = row.expand(2, 512)

    def rounded(seed: int, rng_offset: int) -> torch.Tensor:
        return quantize(x, scheme, seed=seed, stream=rng_offset).dequantize()

    first = rounded(1, 0)
    assert not torch.equal(first[0], first[1]), "two rows drew the same random bits"
    assert torch.equal(first, rounded(1, 0))
    assert not torch.equal(first, rounded(2, 0))
    assert not torch.equal(first, rounded(1, 1))


def test_rng_offsets_share_their_signs():
    x = gaussian(8, 256)
    plain = {
        offset: quantize(x, "nvfp4_46", transform="rht128", seed=4, stream=offset)
        for offset in (0, 1)
    }
    assert torch.equal(plain[0].codes, plain[1].codes)


def test_unknown_scheme_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'nvfp4_ms_eden'"):
        get_scheme("nvfp4_mseden")


@pytest.mark.parametrize("field", ["format", "rounding", "global_scale"])
def test_a_value_that_no_code_implements_is_refused(field):
    """It would be rounded to nearest without a word."""
    with pytest.raises(ValueError, match=f"scheme 'nvfp4': no code implements {field}='odd'"):
        replace(SCHEMES["nvfp4"], **{field: "odd"})
