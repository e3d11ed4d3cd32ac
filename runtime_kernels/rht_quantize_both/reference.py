"""q2::rht_quantize_both in torch: the two single ops."""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.rht_quantize.reference import rht_quantize


@kernel("rht_quantize_both", REFERENCE)
def rht_quantize_both(
    x: torch.Tensor,
    row_seed: torch.Tensor | None,
    col_seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
) -> tuple[torch.Tensor, ...]:
    """See rht_quantize_both/op.py."""
    return (
        *rht_quantize(x, row_seed, scheme, transform, False, stream),
        *rht_quantize(x, col_seed, scheme, transform, True, stream),
    )
