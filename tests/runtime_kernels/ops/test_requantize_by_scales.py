# SPDX-License-Identifier: Apache-2.0
"""q2::requantize by scales against that of codes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from q2compile.runtime_kernels.numerics.scaled_codes import rounded_to_scales, scaled_codes
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.requantize import rounds_by_scales
from tests.support import quantizer_calls as calls
from tests.support.pairwise import pairwise

q2 = torch.ops.q2
FORWARD, EDEN = "nvfp4_46_pow2", "nvfp4_ms_eden_pow2"
SEED = torch.tensor(7)


def bits(parts):
    return [p.reshape(-1).view(torch.uint8) for p in parts]


def test_the_bits_of_codes_requantized() -> None:
    """Rows and columns of padding, blocks of zeros of either sign."""
    for dtype, scheme, source in pairwise(
        [torch.bfloat16, torch.float32],
        [EDEN, EDEN + DEQUANTIZED, "nvfp4_sr"],
        [FORWARD, FORWARD + SWIZZLED, "nvfp4_pow2"],
    ):
        x = torch.randn(150, 100, dtype=dtype)
        x[:, 16:32] = 0.0
        x[:, 32:48] = -0.0
        codes, scales, global_scale = q2.quantize(x, scheme=source, rowwise=True, columnwise=False)
        how = source, scheme, "rht128"
        got = calls.by_scales(x, scales, global_scale, SEED, *how, 1)()
        want = calls.again(codes, scales, global_scale, SEED, *how, 100, 1)()
        assert all(map(torch.equal, bits(got), bits(want)))


def test_under_subnormal_scales_codes_are_nearer() -> None:
    """A code that was rounded before its scale is off by half a step of the largest codes, and by
    the rounding of the scale: 2^-10 of the global scale times a code of at most 6. Both are below
    2^-14 of the tensor's amax, whose scale is 224 at least."""
    x = torch.randn(64, 512) * torch.logspace(-6, 0, 32).repeat_interleave(16)
    codes, scales, global_scale = q2.quantize(x, scheme=FORWARD, rowwise=True, columnwise=False)
    spec = get_scheme(FORWARD)
    kept = scaled_codes(codes, scales, spec) * global_scale
    rounded = rounded_to_scales(x, scales, global_scale, spec) * global_scale
    small = (scales.float() <= 2.0**-6).repeat_interleave(16, 1)
    assert torch.equal(rounded[~small], kept[~small])
    assert 0 < (rounded - kept).abs().max() <= 2.0**-14 * x.abs().max()
    off = [(values - x)[small].norm() for values in (rounded, kept)]
    assert off[0] < off[1]


def test_the_schemes_of_sources() -> None:
    assert {name for name, scheme in SCHEMES.items() if rounds_by_scales(scheme)} == {
        *("nvfp4_46_pow2", "nvfp4_search_pow2", "nvfp4_pow2")
    }


@pytest.mark.parametrize("source", ["nvfp4_46", "nvfp4_sr_pow2", "nvfp4_16x16_pow2", "mxfp4_rtn"])
def test_other_schemes_are_refused(source) -> None:
    x = torch.randn(32, 32)
    scales, global_scale = torch.ones(32, 2).to(torch.float8_e4m3fn), torch.tensor(1.0)
    with pytest.raises(AssertionError, match=f"{source} is not rounded"):
        calls.by_scales(x, scales, global_scale, SEED, source, EDEN, "rht128", 1)()


def test_what_are_no_scales_is_refused() -> None:
    x, scales = torch.randn(32, 32), torch.ones(32, 2).to(torch.float8_e4m3fn)
    how = SEED, FORWARD, EDEN, "rht128", 1
    with pytest.raises(AssertionError, match="by torch.float32 scales"):
        calls.by_scales(x, torch.ones(32, 2), torch.tensor(1.0), *how)()
    with pytest.raises(ValueError, match="float32 scalar"):
        calls.by_scales(x, scales, torch.ones(2), *how)()
    with pytest.raises(ValueError, match="takes a matrix"):
        calls.by_scales(x[0], scales, torch.tensor(1.0), *how)()


def test_the_fake_has_the_shapes_of_the_op() -> None:
    x = torch.randn(150, 100)
    _, scales, global_scale = q2.quantize(x, scheme=FORWARD, rowwise=True, columnwise=False)
    args = (x, scales, global_scale, SEED, FORWARD, EDEN, "rht128", 1)
    got = calls.by_scales(*args)()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = calls.by_scales(*fakes)()
    assert [(f.shape, f.dtype) for f in fake] == [(g.shape, g.dtype) for g in got]
