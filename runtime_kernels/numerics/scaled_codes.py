"""q2::dequantize in torch, and the part of it that GEMM shares."""

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.formats import decode_e2m1
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.swizzle import unswizzle_32x4x4


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


@kernel("dequantize", REFERENCE)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See dequantize/op.py."""
    check_quantized("dequantize", codes, scales, global_scale)
    values = scaled_codes(codes, scales, get_scheme(scheme)).mul_(global_scale)
    return values[:, :cols].to(dtype, memory_format=torch.contiguous_format)
