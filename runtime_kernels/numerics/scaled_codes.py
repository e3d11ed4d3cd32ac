"""Codes to the numbers that they stand for, but for the global scale."""

import torch

from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import unswizzle_32x4x4


def scaled_codes(codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """e2m1(code) * scale, exact in fp32 and in bf16: fp32 [M, Kp]. Widened codes are it already."""
    if scheme.widened:
        return codes.float()
    values = decode_e2m1(codes)
    rows, width = values.shape
    if scheme.swizzled:
        scales = unswizzle_32x4x4(scales, rows, width // scheme.width)
    scale = scales.to(torch.float32)
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[:rows]
    blocks = values.view(rows, width // scheme.width, scheme.width)
    return blocks.mul_(scale.unsqueeze(-1)).view(rows, width)
