# SPDX-License-Identifier: Apache-2.0
"""Bit for bit against torchao's quantizers, written by others from the same format definitions.

Trusted, because each is plain torch, exact, and checked here on its own inputs:

    nvfp4_quantize, per_tensor_amax_to_scale   NVFP4 1x16 with a global scale, round to nearest even
    to_mx with FLOOR                           MXFP4, OCP's scale rule, round to nearest even
    f32_to_f4_unpacked, pack_uint4             e2m1 codes, two a byte, low nibble first
    to_blocked                                 the 32x4x4 swizzle

Not trusted: nvfp4_quantize's scale where it is under 2^-6, which torchao clamps there (the least
normal e4m3) and the format does not; nor its single-level mode, which has no global scale. Its
16x16 quantizer is a Triton kernel for CUDA: 16x16 is compared through the scales of 1x16, since the
largest of 16 rounded scales is the rounded largest, and through torchao's codes under those scales.
"""

import pytest
import torch

from q2compile import quantize
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4

pytest.importorskip("torchao", reason="torchao is in the extra 'dev'")

from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import (
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)
from torchao.prototype.mx_formats.utils import to_blocked


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Blocks within 2^12 of the largest, so that no scale is under 2^-6."""
    tied = torch.randint(-12, 13, (64, 256)).to(dtype) / 4  # bf16 data full of ties
    return {
        "gaussian": torch.randn(64, 256).to(dtype),
        "rows of many magnitudes": (
            torch.randn(64, 256) * torch.logspace(-1.5, 1.5, 64)[:, None]
        ).to(dtype),
        "outlier columns": torch.randn(64, 256).to(dtype)
        * (1 + 50 * (torch.arange(256) % 64 == 3)),
        "ties": tied + 3 * (torch.arange(256) % 16 == 0),
        "tiny": torch.randn(64, 256).to(dtype) * 2.0**-60,
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(inputs(torch.float32)))
def test_nvfp4_1x16(dtype, kind):
    x = inputs(dtype)[kind].to(dtype).contiguous()
    global_scale = per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_quantize(x, 16, global_scale)
    q = quantize(x, "nvfp4")
    assert scales.float().min() > 2.0**-6, "no scale that torchao clamps"
    assert torch.equal(q.global_scale, global_scale)
    assert same_bits(q.scales, scales)
    assert same_bits(q.codes, codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(inputs(torch.float32)))
def test_nvfp4_16x16(dtype, kind):
    x = inputs(dtype)[kind].to(dtype).contiguous()
    global_scale = per_tensor_amax_to_scale(x.abs().max())
    by_row, _ = nvfp4_quantize(x, 16, global_scale)
    shared = by_row.float().view(4, 16, 16).amax(1)
    reciprocal = (1.0 / global_scale) / shared.repeat_interleave(16, 0).unsqueeze(2)
    scaled = x.float().view(64, 16, 16) * reciprocal
    codes = pack_uint4(f32_to_f4_unpacked(scaled.clamp(-6, 6).view(64, 256)))
    q = quantize(x, "nvfp4_16x16")
    assert torch.equal(q.scales.float(), shared)
    assert same_bits(q.codes, codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(inputs(torch.float32)))
@pytest.mark.parametrize("mode, scheme", [("FLOOR", "mxfp4_rtn"), ("RCEIL", "mxfp4_rceil")])
def test_mxfp4(dtype, kind, mode, scheme):
    x = inputs(dtype)[kind].to(dtype).contiguous()
    scales, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[mode])
    q = quantize(x, scheme)
    assert q.scales.dtype == scales.dtype == torch.float8_e8m0fnu
    assert same_bits(q.scales, scales.view(q.scales.shape))
    assert same_bits(q.codes, codes.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 4), (384, 12), (100, 7)])
def test_swizzle(shape):
    scales = torch.randint(0, 127, shape, dtype=torch.uint8)
    assert torch.equal(swizzle_32x4x4(scales), to_blocked(scales).flatten())
