"""q2::pad_groups: groups of rows, each moved to where a group of more rows begins.

    pad_groups(x [T, C], offs [E], padded_offs [E], rows) -> [rows, C]

``offs`` are the ends of the groups of x, int32 and ascending: group e is x's rows from offs[e - 1]
to offs[e]. In the result it begins at padded_offs[e - 1]; the rows between two groups
and after the last are zero. Rows of x from offs[E - 1] on belong to no group and are dropped.

With padded groups of whole blocks and chunks, no block and no rotation along T mixes the rows of
two groups. ``rows`` is given, and no size is read from ``offs``: nothing waits for the device.
"""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(x, offs, padded_offs, rows):
    return x.new_empty((rows, x.shape[1]))


define("pad_groups(Tensor x, Tensor offs, Tensor padded_offs, SymInt rows) -> Tensor", fake=fake)


@kernel("pad_groups", REFERENCE)
def pad_groups(
    x: torch.Tensor, offs: torch.Tensor, padded_offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """See above. x has any dtype; fp8, which few functions take, is moved as bytes."""
    if x.shape[0] == 0:
        return torch.zeros((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    row = torch.arange(rows, dtype=offs.dtype, device=x.device)
    group = torch.searchsorted(padded_offs, row, right=True).clamp_(max=offs.shape[0] - 1)
    source = row - _starts(padded_offs)[group] + _starts(offs)[group]
    outside = source >= offs[group]
    stored = x.view(torch.uint8) if x.element_size() == 1 else x
    moved = stored[source.clamp_(max=x.shape[0] - 1)].masked_fill_(outside[:, None], 0)
    return moved.view(x.dtype)


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends[:-1], (1, 0))
