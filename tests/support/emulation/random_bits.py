# SPDX-License-Identifier: Apache-2.0
"""Numbers for stochastic rounding that are next to where their random bits take them up."""

import torch

from q2compile.runtime_kernels.numerics import philox


def close_to_their_random_bits(
    seed: torch.Tensor, rows: int, cols: int, rng_offset: int = 1
) -> torch.Tensor:
    """fp32 [rows, cols] for q2::quantize with scheme nvfp4_sr_pow2, this seed and rng_offset.

    One 5.5 in each block makes its scale 1. The other elements are below 1/2, so that the grid
    around them is {0, 1/2}, and 2^-22 of a step is 2^-23. In these units they are below the
    threshold for rounding up by 1, 3/4, 1/2 or 0, before they are rounded to the nearest one, ties
    to even. Signs vary.
    """
    random = philox.element_bits(
        seed, rows * cols, rng_offset=rng_offset, purpose=philox.RANDOM_BITS
    )
    short = torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64)
    at = torch.arange(rows * cols)
    x = (2.0**22 - random.double() - short[at % 4]) * 2.0**-23
    x = torch.where(at % 8 < 4, x, -x).view(rows, cols)
    x[:, ::16] = 5.5
    return x.float()
