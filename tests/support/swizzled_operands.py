# SPDX-License-Identifier: Apache-2.0
"""Operands of FP4 GEMMs with block scales in the 32x4x4 layout, by torch."""

import torch
from torch import Tensor

from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4, unswizzle_32x4x4
from q2compile.runtime_kernels.ops.gemm import Factor


def swizzled(factor: Factor) -> Tensor:
    """As the function of this name in cuda/gemm/swizzle.py, for nvfp4."""
    codes, scales, _, spec = factor
    if spec.swizzled:
        return scales
    plain = scales.view(torch.uint8).repeat_interleave(spec.block[0], 0)[: codes.shape[0]]
    return swizzle_32x4x4(plain.view(torch.float8_e4m3fn))


def dequantized(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """An operand of nvfp4, but for its global scale."""
    plain = unswizzle_32x4x4(scales, rows, codes.shape[1] // 8).float()
    return decode_e2m1(codes) * plain.repeat_interleave(16, 1)
