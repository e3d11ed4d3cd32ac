# SPDX-License-Identifier: Apache-2.0
"""Sums of the columns of a matrix in fp32, in the order in which the rotating quantizers make them
on their way (cuda/csrc/rotate_quantize.cu, cuda/csrc/include/sums.cuh).

Tiles of 128 rows are summed apart, rows that there are none of as zeros. In a tile four sums each
of 32 rows, 16 q .. 16 q + 15 and those 64 below, q = 0 .. 3, are added row by row; then
(0 + 1) + (2 + 3). Of the tiles eight strands, t = s, s + 8, ..., s = 0 .. 7, are added tile by
tile; then the strands, from the first to the last. The end is one rounding to the result's dtype.

A number takes part in at most 41 + ceil(tiles / 8) roundings of fp32, each a relative 2^-24 of what
is summed so far; in a plain sum, in as many as there are rows. Inductor's loops add in an order of
their own, which depends on the GPU and the sizes. Two such results differ by at most the roundings
of both; of bf16 that is seldom a step, where sums do not cancel.
"""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.numerics.layout import ceil_div

TILE = 128
STRANDS = 8
_LANES, _RUN = 4, 16  # that share a tile's rows, in runs of so many


def column_sums(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [M, K] of any float dtype -> [K] of dtype."""
    rows, columns = x.shape
    tiles = ceil_div(rows, TILE)
    x = pad(x.float(), (0, 0, 0, tiles * TILE - rows))
    x = x.reshape(tiles, TILE // (_LANES * _RUN), _LANES, _RUN, columns)
    lanes = x.new_zeros((tiles, _LANES, columns))
    for half in range(x.shape[1]):
        for i in range(_RUN):
            lanes = lanes + x[:, half, :, i]
    of_tiles = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
    rounds = ceil_div(tiles, STRANDS)
    of_tiles = pad(of_tiles, (0, 0, 0, rounds * STRANDS - tiles))
    strands = x.new_zeros((STRANDS, columns))
    for tile in of_tiles.reshape(rounds, STRANDS, columns):
        strands = strands + tile
    total = strands[0]
    for strand in strands[1:]:
        total = total + strand
    return total.to(dtype)
