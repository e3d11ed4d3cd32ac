# SPDX-License-Identifier: Apache-2.0
"""Inputs for stochastic rounding at, or just below, the threshold for rounding them up."""

import torch

from q2compile.runtime_kernels.numerics import philox


def close_to_their_random_bits(
    seed: torch.Tensor, rows: int, cols: int, rng_offset: int = 1
) -> torch.Tensor:
    """fp32 [rows, cols] for q2::quantize with scheme nvfp4_sr_pow2, this seed and rng_offset.

    The first element of each block is 5.5, so that the scale of the block is 1. The others are
    between 0 and 1/2, neighbors on the grid. Each has a threshold, which follows from its random
    bits: from there on it is rounded up. In units of 2^-23, the precision of the threshold, the
    elements are below it by 1, 3/4, 1/2 and 0 in turn. The signs change every four elements.
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
