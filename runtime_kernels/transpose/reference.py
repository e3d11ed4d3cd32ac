"""q2::transpose in torch."""

import torch

from q2compile.runtime_kernels.layout import ceil_div, unpack
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.transpose.op import checked


@kernel("transpose", REFERENCE)
def transpose(
    codes: torch.Tensor, scales: torch.Tensor, scheme: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See transpose/op.py."""
    side = checked(scheme).width
    turned = unpack(codes)[:, :rows].t()
    turned = torch.nn.functional.pad(turned, (0, -codes.shape[0] % side))
    packed = turned[:, 0::2] | (turned[:, 1::2] << 4)
    return packed.contiguous(), scales[:, : ceil_div(rows, side)].t().contiguous()
