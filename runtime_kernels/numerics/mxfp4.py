# SPDX-License-Identifier: Apache-2.0
"""Rounding rules of MXFP4: e2m1 codes in blocks of 32, e8m0 scales (powers of two), no second
level.

    rtn, sr   s = 2^(floor(log2 largest) - 2); code = round(shrink * x / s)
    rceil     s = 2^ceil(log2(largest / 6)); code = round(x / s)
    quest     s = 2^round(log2(2.92247856/6 * rms)); code = e2m1(x / s), trusted where |x / s| < 6

The first is the scale rule of OCP's "Microscaling Formats (MX) v1.0", section 6.3: largest / s
lies in [4, 8), of which the codes hold up to 6. With shrink = 3/4 nothing clips; the factor comes
back as a global scale of 4/3, so that a GEMM's alpha is the papers' 16/9 ("Training LLMs with
MXFP4", 2502.20586, with SR; Quartet, 2505.14669 v4, algorithm 1, with RTN). Under rceil, the rule
of "Recipes for Pre-training LLMs with MXFP8" (2506.08027), largest / s lies in (3, 6]. QuEST:
Quartet, section 4.3; its constant, from the authors' code, makes the error on a Gaussian smallest.
"""

import torch

from q2compile.runtime_kernels.numerics.blocks import Blocks, Rounded, sum_neighbors
from q2compile.runtime_kernels.numerics.formats import exponent_of, power_of_two

QUEST_CLIP = 2.92247856  # in units of the standard deviation, for 16 levels
_MIN_EXPONENT, _MAX_EXPONENT = -127, 127  # of e8m0
# Added to the bits of an fp32, it carries into the exponent if the significand is above 1.5.
ABOVE_HALF = 0x3FFFFF


def rounded(blocks: Blocks) -> Rounded:
    """The scheme's rule."""
    scheme, largest = blocks.scheme, blocks.largest
    quest = scheme.rounding == "quest"
    if quest:
        exponent = _quest_exponent(blocks.x, largest)
    elif scheme.rceil:
        exponent = _exponent_rounded_up(largest)
    else:
        exponent = exponent_of(largest) - 2
    # 127 is left out, so that the reciprocal is no subnormal: no finite x has such a scale.
    exponent = exponent.clamp(_MIN_EXPONENT, _MAX_EXPONENT - 1)
    scaled = blocks.scaled(scheme.shrink * power_of_two(-exponent))
    values = blocks.to_e2m1(scaled)
    scales = blocks.join_scales((exponent - _MIN_EXPONENT).to(torch.uint8))
    global_scale = largest.new_full((), 1.0 / scheme.shrink)
    trusted = (scaled.abs_() < 6.0) & ~blocks.poisoned if quest else None
    return Rounded(values, scales.view(torch.float8_e8m0fnu), global_scale, trusted)


def _exponent_rounded_up(largest: torch.Tensor) -> torch.Tensor:
    """ceil(log2(largest / 6)), without a logarithm: 6 is 1.5 * 2^2, so a significand above 1.5
    takes the next power."""
    return ((largest.view(torch.int32) + ABOVE_HALF) >> 23) - 127 - 2


def _quest_exponent(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """round(log2(c * rms)), c = 2.92247856/6, without a logarithm: with w = (c * rms)^2 in
    [2^e, 2^(e+1)) it is ceil(e / 2). The block is first scaled by a power of two to a maximum in
    [1, 2), so that its squares are in range at any magnitude.

    The authors' code adds 1e-8 inside the logarithm; without it x * 2^j has the codes of x for
    every j. It also cuts the logarithm down to an integer; only rounded does it give the paper's
    error (Quartet, table 2).
    """
    top = exponent_of(largest).clamp(min=-126)
    mean_square = sum_neighbors((x * power_of_two(-top)).square_()) / x.shape[1]
    e = exponent_of(mean_square * (QUEST_CLIP / 6.0) ** 2)
    return top + ((e + 1) >> 1)
