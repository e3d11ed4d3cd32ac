"""q2::split_scales in torch."""

import torch

from q2compile.runtime_kernels.formats import nearest_e4m3
from q2compile.runtime_kernels.nvfp4 import pow2_global_scale
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.split_scales.op import checked
from q2compile.runtime_kernels.swizzle import swizzle_32x4x4


@kernel("split_scales", REFERENCE)
def split_scales(worth: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See split_scales/op.py."""
    spec = checked(worth, scheme)
    unit = pow2_global_scale(worth, worth, spec.cap)
    scales = nearest_e4m3(worth / unit)
    return swizzle_32x4x4(scales).view(-1, 512) if spec.swizzled else scales, unit
