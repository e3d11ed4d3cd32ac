# SPDX-License-Identifier: Apache-2.0
"""The errors of schemes on Gaussian data."""

import pytest
import torch

from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.ops.gaussian import gaussian_error


def test_gaussian_errors_are_those_of_the_papers_tables():
    """Squares: NVFP4 RTN 9.0e-3, 4/6 7.6e-3, MS-EDEN 9.4e-3 by Quartet II, table 1; the samples
    here leave 2%."""
    for scheme, squared in (("nvfp4", 9.0e-3), ("nvfp4_46", 7.6e-3), ("nvfp4_ms_eden", 9.4e-3)):
        assert gaussian_error(scheme) ** 2 == pytest.approx(squared, rel=0.03)
    # e4m3 with 4 significant bits: 2^-4 / sqrt(3), averaged over a binade and less for the small.
    assert gaussian_error("fp8") ** 2 == pytest.approx(7.0e-4, rel=0.03)
    assert all(0.05 < gaussian_error(name) < 0.2 for name in SCHEMES if name != "fp8")
    assert gaussian_error("none of ours") is None


def test_gaussian_errors_do_not_depend_on_the_default_device():
    known = gaussian_error("nvfp4_sr")
    gaussian_error.cache_clear()
    with torch.device("meta"):
        assert gaussian_error("nvfp4_sr") == known
