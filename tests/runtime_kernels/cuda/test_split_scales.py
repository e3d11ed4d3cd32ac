# SPDX-License-Identifier: Apache-2.0
"""q2::split_scales: by hand, against the quantizer whose last step it is, and its CUDA kernel on a
CPU (tests/support/emulation)."""

from __future__ import annotations

import shutil

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from tests.support.emulation.on_cpu import launches_on_cpu

SCHEMES = ("nvfp4_46_pow2", "nvfp4_pow2")
ON_CUDA = (*SCHEMES, "nvfp4_16x16_pow2", *(scheme + SWIZZLED for scheme in SCHEMES))


def test_by_hand() -> None:
    raw_scale = torch.tensor([[1.0, 448.0, 480.0], [0.0, 2.0**-9, 3 * 2.0**-11]])
    scales, unit = torch.ops.q2.split_scales(raw_scale, "nvfp4_pow2")
    assert unit == 2.0  # 480 is beyond e4m3's 448
    # 2^-10 and .75 * 2^-10 lie between 0 and e4m3's smallest, 2^-9: a tie goes to even, zero
    assert scales.float().tolist() == [[0.5, 224.0, 240.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_quantizer_s_own(scheme: str) -> None:
    """Scales that are already split come back, and the global scale with them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    _, scales, unit = torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False)
    again, unit_again = torch.ops.q2.split_scales(scales.float() * unit, scheme)
    assert unit_again == unit and torch.equal(again.float(), scales.float())


@pytest.mark.parametrize("shape", [(3, 5), (300, 41)])
def test_swizzled(shape) -> None:
    """The same scales in other places, as the fake says."""
    raw_scale = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    plain, unit = torch.ops.q2.split_scales(raw_scale, "nvfp4_pow2")
    scales, same_unit = torch.ops.q2.split_scales(raw_scale, "nvfp4_pow2" + SWIZZLED)
    assert torch.equal(scales.view(torch.uint8).flatten(), swizzle_32x4x4(plain).view(torch.uint8))
    assert unit == same_unit
    fake = torch.ops.q2.split_scales(raw_scale.to("meta"), "nvfp4_pow2" + SWIZZLED)
    assert fake[0].shape == scales.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison(value: float) -> None:
    """A NaN marks a poisoned block. No block has an Inf, which has no global scale."""
    scales, unit = torch.ops.q2.split_scales(torch.tensor([[1.0, value]]), "nvfp4_pow2")
    nan = torch.tensor([[value == float("inf"), True]])
    assert torch.equal(scales.float().isnan(), nan) and unit.isfinite() == (not nan.all())


@pytest.mark.parametrize(
    ("raw_scale", "words"),
    [
        (torch.ones(4, 4, dtype=torch.bfloat16), "got torch.bfloat16"),
        (torch.ones(4), "float32 in 1"),
    ],
)
def test_refused_operands(raw_scale: torch.Tensor, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        torch.ops.q2.split_scales(raw_scale, "nvfp4_pow2")


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_ms_eden_pow2", "mxfp4_rtn"])
def test_refused_schemes(scheme: str) -> None:
    with pytest.raises(AssertionError, match=f"makes no scales of {scheme}"):
        torch.ops.q2.split_scales(torch.ones(4, 4), scheme)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("shape", [(3, 5), (300, 41)])
@pytest.mark.parametrize("scheme", ON_CUDA)
def test_cuda_source_on_a_cpu(scheme, shape, monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    generator = torch.Generator().manual_seed(1)
    raw_scale = torch.randn(shape, generator=generator).mul(4).exp()
    got = other_ops.split_scales(raw_scale, scheme)
    want = torch.ops.q2.split_scales(raw_scale, scheme)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and got[1] == want[1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5), (300, 41), (8192, 256)])
@pytest.mark.parametrize("scheme", ON_CUDA)
def test_on_a_gpu(scheme, shape) -> None:
    raw_scale = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(4).exp()
    got = torch.ops.q2.split_scales(raw_scale.cuda(), scheme)
    want = torch.ops.q2.split_scales(raw_scale, scheme)
    assert torch.equal(got[0].cpu().view(torch.uint8), want[0].view(torch.uint8))
    assert got[1].item() == want[1].item()
