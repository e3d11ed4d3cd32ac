"""q2::split_scales in torch."""

import torch

from q2compile.runtime_kernels.formats import nearest_e4m3
from q2compile.runtime_kernels.nvfp4 import pow2_global_scale
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.split_scales.op import checked


@kernel("split_scales", REFERENCE)
def split_scales(worth: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See split_scales/op.py."""
    unit = pow2_global_scale(worth, worth, checked(worth, scheme).cap)
    return nearest_e4m3(worth / unit), unit
