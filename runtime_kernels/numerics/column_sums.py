# SPDX-License-Identifier: Apache-2.0
"""Sums of the columns of a matrix in fp32 (dbias), in the order in which the rotating quantizers
add (cuda/csrc/rotate_quantize.cu, cuda/csrc/include/sums.cuh).

1. Each tile of 128 rows is summed by itself; missing rows count as zeros. Sum q = 0 .. 3 of a tile
   adds 32 rows one by one: 16 q .. 16 q + 15, and those 64 below. Then (0 + 1) + (2 + 3).
2. Strand s = 0 .. 7 adds tiles s, s + 8, ... one by one.
3. The strands are added from the first to the last, and rounded once to the result's dtype.

An element takes part in at most 41 + ceil(tiles / 8) roundings of fp32, each a relative 2^-24 of
the partial sum; in a plain sum there are as many roundings as rows. Inductor's kernels add in an
order that depends on the GPU and the sizes. Two such results differ by at most the roundings of
both. In bf16 that is seldom a step, unless sums cancel.
"""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.numerics.layout import ceil_div

TILE = 128
STRANDS = 8
_LANES, _RUN = 4, 16  # sums of a tile, and the rows in a run of one


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
