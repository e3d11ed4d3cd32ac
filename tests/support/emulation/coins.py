# SPDX-License-Identifier: Apache-2.0
"""Numbers for stochastic rounding whose fractions agree with their coins in the first 22 bits."""

import torch

from q2compile.runtime_kernels.numerics import philox


def close_to_their_coins(seed: torch.Tensor, rows: int, cols: int, stream: int = 1) -> torch.Tensor:
    """fp32 [rows, cols] for q2::quantize with scheme nvfp4_sr_pow2, this seed and stream.

    Block scales are 1, from one 5.5 a block. The others are below 1/2, so that the grid around them
    is {0, 1/2} and the fraction of a step is 2x: the first 22 bits of the coin, then 0, 1/4, 1/2 or
    3/4 of the next. The kernels' short way of rounding sees the 22 bits alone.
    """
    coins = philox.words(seed, rows * cols, stream=stream, purpose=philox.COINS).view(rows, cols)
    part = torch.arange(rows * cols).view(rows, cols) % 4 / 4
    x = ((coins >> 10) + part.double()) * 2.0**-23
    x = x.float().double()  # 24 bits hold them all but where the first is set
    x[:, ::16] = 5.5
    return x.float()
