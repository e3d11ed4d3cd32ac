# SPDX-License-Identifier: Apache-2.0
"""q2::to_e4m3: an MXFP4 operand for FP8 GEMMs, as e4m3 elements under one scale.

    to_e4m3(codes uint8 [M, Kp/2], scales e8m0, global_scale, scheme)
        -> e4m3 [M, Kp], scale fp32 0-dim

    top = the exponent of the largest block scale;  unit = 2^(top - 6)
    element = e4m3(e2m1(code) * 2^exponent / unit), to nearest even;  scale = unit * global_scale

The largest code, 6, of the largest block becomes 6 * 2^6 = 384, of at most 448. A code has 2
significant bits and e4m3 4, and the smallest code, .5 * 2^-8, is the smallest subnormal, 2^-9. So
blocks whose scales are at most 2^14 below the largest are exact. In a block further below, an
element is off by at most half a subnormal, 2^-10 * unit, which is 2^-16 of the largest scale, and
by no more than its own size: what is not above 2^-10 * unit becomes 0. Telemetry has the share of
such blocks (numerics/statistics.py, scale_subnormal).

A poisoned block (scale NaN) stays NaN and does not count as the largest. top is at least -120, so
that unit is no subnormal.
"""

import torch

from q2compile.runtime_kernels.numerics.formats import power_of_two
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import define

_LEAST = 7  # the bits of a scale of 2^-120


def checked_to_e4m3(codes, scales, global_scale, scheme: str) -> Scheme:
    """The scheme by name: of codes and power-of-two scales, since only those are exact in e4m3."""
    spec = get_scheme(scheme)
    assert spec.format == "mxfp4" and not spec.form, f"q2::to_e4m3 takes no codes of {scheme}"
    check_quantized("to_e4m3", codes, scales, global_scale)
    return spec


def fake(codes, scales, global_scale, scheme):
    checked_to_e4m3(codes, scales, global_scale, scheme)
    shape = codes.shape[0], 2 * codes.shape[1]
    return codes.new_empty(shape, dtype=torch.float8_e4m3fn), global_scale.new_empty(())


@define(
    "to_e4m3(Tensor codes, Tensor scales, Tensor global_scale, str scheme) -> (Tensor, Tensor)",
    fake=fake,
)
def to_e4m3(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    spec = checked_to_e4m3(codes, scales, global_scale, scheme)
    bits = scales.view(torch.uint8).int()
    top = torch.where(bits == 255, 0, bits).flatten()
    top = torch.cat([top, top.new_tensor([_LEAST])]).amax()
    relative = torch.where(bits == 255, bits, (bits - top + 6 + 127).clamp(min=0))
    elements = scaled_codes(codes, relative.to(torch.uint8).view(scales.dtype), spec)
    return elements.to(torch.float8_e4m3fn), global_scale * power_of_two(top - 127 - 6)
