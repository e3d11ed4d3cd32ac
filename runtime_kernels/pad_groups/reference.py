"""q2::pad_groups in torch."""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("pad_groups", REFERENCE)
def pad_groups(
    x: torch.Tensor, offs: torch.Tensor, padded_offs: torch.Tensor, rows: int
) -> torch.Tensor:
    """See pad_groups/op.py. x has any dtype; fp8, which few functions take, is moved as bytes."""
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
