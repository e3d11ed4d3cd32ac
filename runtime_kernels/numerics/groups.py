# SPDX-License-Identifier: Apache-2.0
"""The padded layout of rows in groups (the tokens of experts): each group begins at a whole chunk.
Where rows are contracted, no block and no rotation may mix two groups. The rows of a plain linear,
if they are few, are one group.

T rows in E groups; offs, int32 [E], are the ends of the groups, ascending. Group e has the rows
from offs[e - 1] to offs[e], and begins in the padded layout at padded_offs[e - 1], a multiple of
UNIT. Rows from offs[E - 1] on belong to no group. No size is read from offs, so that nothing waits
for the device: the padded layout has `padded_rows` rows, the most that it can need with the rows of
no group as one more, and zeros where it needs less.

Spreading. MS-EDEN's correction is right on average over rotations that make many values of each
vector, and a chunk of few tokens is rotated to few values: with 2 tokens the two magnitudes |a + b|
and |a - b|, with their own rounding errors in every draw. Measured on the product of two operands
(N(0,1), 64 x 64 of them, 1500 draws), the bias relative to the product, and the error of a draw:

    tokens in a chunk            2      3      4      8     12     16     24     32
    zeros after them   bias   .058   .081   .059   .029   .013   .005   .001      0
                       draw   .058   .081   .084   .111   .109   .128   .110   .125

So a chunk that its group leaves at most half full is filled otherwise, by its number of tokens:

    33 - 64   2 copies of each token, side by side, each over sqrt(2)
    17 - 32   4, over 2
     9 - 16   8, over sqrt(8)
     1 -  8   no copies: token i at row 16 i of the chunk

Copies leave the product what it is, r * (x / sqrt(r)) * (dy / sqrt(r)), and give each token a
vector of more values than +-1 under the rotation: no bias is left to be seen (below .0004), and the
error of a draw falls to .036 - .09, as the errors of the copies are averaged. The last rule is
unbiased. The rotation's first four steps make each block of 16 constant. So all its codes are 6,
and the stochastic rounding of its scale has that constant as its mean.
"""

import torch

from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform

UNIT = 128  # rows of a chunk of the padded layout: those of the largest rotation
# By log2 of the rows of a token: what its copies are multiplied by; the last are no copies.
SHARES = (1.0, 0.5**0.5, 0.5, 0.125**0.5, 1.0)


def spreads(scheme: Scheme, transform: Transform) -> bool:
    """Whether chunks that a group leaves short are spread."""
    return scheme.rounding == "ms_eden" and transform.size == UNIT


def padded_rows(rows, groups: int):
    """Rows of the padded layout. Works on symbolic sizes."""
    return (rows + (groups + 1) * UNIT - 1) // UNIT * UNIT


def padded_ends(offs: torch.Tensor, filled: bool = False) -> torch.Tensor:
    """The ends of the groups in the padded layout: int32 [E]. filled: an empty group has a chunk of
    zeros, too."""
    sizes = (offs - _starts(offs)).clamp(min=int(filled))
    chunks = (sizes + (UNIT - 1)).div(UNIT, rounding_mode="floor")
    return (chunks * UNIT).cumsum(0, dtype=torch.int32)


def lay_out(
    x: torch.Tensor, offs: torch.Tensor, padded_offs: torch.Tensor, *, spread: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, C] in the padded layout: [Tp, C]. With spread, chunks are filled as above, and the
    factor that the rows of each chunk have still to be multiplied by comes with it: fp32 [Tp /
    UNIT], else None."""
    rows, groups = padded_rows(x.shape[0], offs.shape[0]), offs.shape[0]
    chunk = torch.arange(0, rows, UNIT, dtype=offs.dtype, device=x.device)
    group = torch.searchsorted(padded_offs, chunk, right=True)
    of = group.clamp(max=groups - 1)
    first = chunk - _starts(padded_offs)[of] + _starts(offs)[of]
    count = torch.where(group < groups, (offs[of] - first).clamp(0, UNIT), 0)
    shift = sum(((count <= n).int() for n in (64, 32, 16, 8)), torch.zeros_like(chunk))
    if not spread:
        shift = torch.zeros_like(shift)
    place = torch.arange(UNIT, dtype=offs.dtype, device=x.device)
    token = place >> shift[:, None]
    live = (token < count[:, None]) & ((shift[:, None] < 4) | (place % 16 == 0))
    if x.shape[0] == 0:
        moved = x.new_zeros((rows, x.shape[1]))
    else:
        source = (first[:, None] + token).clamp(0, x.shape[0] - 1)
        moved = x[source.flatten()].masked_fill_(~live.flatten()[:, None], 0)
    return moved, _shares(shift) if spread else None


def _shares(shift: torch.Tensor) -> torch.Tensor:
    """SHARES[shift], fp32, computed: a table would be copied from the host, which is not possible
    in the capture of a CUDA graph."""
    shares = torch.ones_like(shift, dtype=torch.float32)
    for copies, share in enumerate(SHARES):
        shares.masked_fill_(shift == copies, share)
    return shares


def clear_tail(codes: torch.Tensor, padded_offs: torch.Tensor) -> torch.Tensor:
    """Make rows of no group +0, in place, in codes [C, Tp/2] (fp8 or dequantized: [C, Tp]) of the
    padded layout. Rotated zeros could be -0."""
    step = 2 if codes.dtype == torch.uint8 else 1
    row = step * torch.arange(codes.shape[1], device=codes.device)
    stored = (
        codes.view(torch.uint8) if codes.element_size() == 1 else codes
    )  # few functions take fp8
    stored.masked_fill_(row >= padded_offs[-1], 0)
    return codes


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends[:-1], (1, 0))
