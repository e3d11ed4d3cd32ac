# SPDX-License-Identifier: Apache-2.0
"""q2::gemm as a product of two bf16 matrices by cuBLAS; q2::grouped_gemm as one grouped product of
torch's: no loop over the groups, and the host does not wait for the device.

Exact except for the order of the sums: code * scale has 6 significant bits. For a result in bf16, a
global scale that is a power of two is multiplied into the operands at no cost.
"""

from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel
from q2compile.runtime_kernels.cuda.gemm.grouped_mm import grouped_mm, unserved
from q2compile.runtime_kernels.cuda.other_ops import dequantize
from q2compile.runtime_kernels.numerics.swizzle import plain_scales
from q2compile.runtime_kernels.ops.gemm import Factor, product
from q2compile.runtime_kernels.ops.grouped_gemm import grouped_product
from q2compile.runtime_kernels.ops.table import GROUPED_GEMM
from q2compile.runtime_kernels.registry import CUDA_BF16


@cuda_kernel("gemm", CUDA_BF16)
def gemm_bf16(*args: Any) -> torch.Tensor:
    """See ops/gemm.py, whose product this is."""
    return product(args, lambda factor, _: dequantized(factor, factor.global_scale is not None))


def dequantized(factor: Factor, is_scaled: bool) -> torch.Tensor:
    """code * scale, times the global scale if is_scaled: bf16 [M, Kp], exact.

    Swizzled scales come from operands that were made for a kernel on fp4 tensor cores, which was
    then rejected.
    """
    codes, scales, global_scale, spec = factor
    if spec.dequantized:
        return codes
    scales = plain_scales(scales, codes.shape[0], factor.contraction, spec)
    how = spec.with_form("").name, factor.contraction, torch.bfloat16
    return dequantize(codes, scales, global_scale if is_scaled else None, *how)


# ---- grouped ----


def _why_not_grouped(*args: Any) -> str | None:
    b_codes, offs, (gemm, dtype) = args[3], args[6], args[9:]
    columns = b_codes.shape[0] // offs.shape[0] if gemm == "fprop" else b_codes.shape[0]
    return unserved(b_codes.device.index, dtype, columns)


@cuda_kernel(GROUPED_GEMM, CUDA_BF16, _why_not_grouped)
def grouped_gemm_bf16(*args: Any) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    return grouped_product(args, dequantized, grouped_mm)
