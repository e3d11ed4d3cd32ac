"""q2::grouped_mm in torch."""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("grouped_mm", REFERENCE)
def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """See grouped_mm/op.py. On CUDA bf16 operands take torch's grouped kernel; others make torch
    read the offsets on the host, once a call."""
    out = torch._grouped_mm(a, b, offs=offs)
    if b.dim() == 3:  # torch leaves the rows of no group as they were in memory
        row = torch.arange(a.shape[0], device=a.device)
        out.masked_fill_((row >= offs[-1])[:, None], 0)
    return out
