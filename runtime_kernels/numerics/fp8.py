# SPDX-License-Identifier: Apache-2.0
"""Rounding rule of FP8: e4m3 codes and one power of two for the whole tensor.

    g = the smallest 2^k with amax / g <= 448;  code = e4m3(x / g), to nearest even

x / g is exact, unless it is an fp32 subnormal, so the code has the only rounding. A tensor of zeros
has g = 1. amax is over the finite elements. An element that is not finite gets the code NaN; e4m3
has no infinity. So a NaN or an Inf stays in its place, and no other element changes.
"""

import torch

from q2compile.runtime_kernels.numerics.blocks import finite_or_nan, largest_of
from q2compile.runtime_kernels.numerics.schemes import E4M3_MAX

EXPONENT = 0x7F800000
QUARTER = 0x1FFFFF  # carries into the exponent from a mantissa above 1.75, as 448 = 1.75 * 2^8 has
EIGHT, LEAST = 8 << 23, 1 << 23


def pow2_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """g of an fp32 scalar amax, from 2^-126 to 2^120; NaN where amax is not finite."""
    bits = (amax.view(torch.int32) + QUARTER).bitwise_and_(EXPONENT) - EIGHT
    power = bits.clamp_(min=LEAST).view(torch.float32)
    return finite_or_nan(torch.where(amax == 0, 1.0, power), amax)


def quantize(x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 x of any shape -> codes, float8_e4m3fn of that shape; g, fp32 0-dim.

    amax: fp32 0-dim, the largest finite |x|; by default it is computed.
    """
    is_finite = x.isfinite()
    if amax is None:
        amax = largest_of(x.abs().where(is_finite, 0.0).flatten())
    global_scale = pow2_of_amax(amax)
    # Clamped first: whether torch's own cast saturates depends on its version.
    scaled = (x * (1.0 / global_scale)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.where(is_finite, torch.nan).to(torch.float8_e4m3fn), global_scale
