"""q2::seed in torch."""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("seed", REFERENCE)
def seed(anchor: torch.Tensor, salt: int) -> torch.Tensor:
    """See seed/op.py. int64, 0-dim, on anchor's device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=anchor.device)
