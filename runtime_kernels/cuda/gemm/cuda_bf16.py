# SPDX-License-Identifier: Apache-2.0
"""q2::gemm as a product of two bf16 matrices by cuBLAS.

Exact except for the order of the sums: code * scale has 6 significant bits. A global scale that is
a power of two is multiplied into the operands at no cost.
"""

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, load
from q2compile.runtime_kernels.cuda.dequantize import dequantize, launches
from q2compile.runtime_kernels.cuda.gemm.operands import (
    finished,
    without_contraction,
)
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import unswizzle_32x4x4
from q2compile.runtime_kernels.ops.gemm import alpha_of, checked_gemm
from q2compile.runtime_kernels.registry import CUDA_BF16


def prepare_operands(*args) -> None:
    """Loads the kernels that dequantize the operands of a GEMM, plain or grouped."""
    for codes, scheme in ((args[0], args[7]), (args[3], args[8])):
        if not get_scheme(scheme).dequantized:
            load(launches(codes, scheme, 2 * codes.shape[1], torch.bfloat16), codes.device.index)


@cuda_kernel("gemm", CUDA_BF16, prepare=prepare_operands)
def gemm_bf16(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py."""
    a_spec, b_spec = checked_gemm(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    if 0 in (*a_codes.shape, *b_codes.shape):
        return without_contraction(a_codes, b_codes, bias, dtype)
    has_pow2_scale = a_spec.has_pow2_scale and b_spec.has_pow2_scale and b_global is not None
    a = dequantized(a_codes, a_scales, a_global if has_pow2_scale else None, a_spec)
    b = dequantized(b_codes, b_scales, b_global if has_pow2_scale else None, b_spec)
    if has_pow2_scale and dtype == torch.bfloat16:
        if bias is None:
            return a @ b.t()
        if bias.dtype == dtype:  # added to the fp32 sums
            return torch.addmm(bias, a, b.t())
    out = torch.mm(a, b.t(), out_dtype=torch.float32)
    return finished(out, None if has_pow2_scale else alpha_of(a_global, b_global), bias, dtype)


def dequantized(codes, scales, global_scale, spec: Scheme) -> torch.Tensor:
    """code * scale, times global_scale if it is given: bf16 [M, Kp], exact.

    Swizzled scales come from operands that were made for a kernel on fp4 tensor cores, which was
    then rejected.
    """
    if spec.dequantized:
        return codes
    rows, width = codes.shape[0], 2 * codes.shape[1]
    if spec.swizzled:
        scales = unswizzle_32x4x4(scales, rows, width // spec.width)
    scheme = spec.name.removesuffix(SWIZZLED)
    return dequantize(codes, scales, global_scale, scheme, width, torch.bfloat16)
