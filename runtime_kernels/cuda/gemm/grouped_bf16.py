# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm as one grouped product of bf16 matrices: no loop over the groups, and the host
does not wait for the device.

Exact except for the order of the sums, as cuda_bf16.py, if both global scales are powers of two.
"""

from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel
from q2compile.runtime_kernels.cuda.gemm.cuda_bf16 import dequantized, prepare_operands
from q2compile.runtime_kernels.cuda.gemm.grouped_mm import grouped_mm, unserved, zero_rows_launch
from q2compile.runtime_kernels.ops.gemm import checked_factors, has_pow2_scales
from q2compile.runtime_kernels.ops.grouped_gemm import as_grouped, factor_of
from q2compile.runtime_kernels.registry import CUDA_BF16


def _why_not(*args: Any) -> str | None:
    b_codes, offs, (gemm, dtype) = args[3], args[6], args[9:]
    columns = b_codes.shape[0] // offs.shape[0] if gemm == "fprop" else b_codes.shape[0]
    return unserved(b_codes.device.index, dtype, columns)


def _prepare(*args: Any) -> None:
    zero_rows_launch().warm_up(args[0].device.index)
    prepare_operands(*args)


@cuda_kernel("grouped_gemm", CUDA_BF16, _why_not, _prepare)
def grouped_gemm_bf16(*args: Any) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    (a, b), (offs, *_, gemm, _) = checked_factors("grouped_gemm", args), args[6:]
    is_scaled = has_pow2_scales(a, b)
    left, right = (dequantized(each, is_scaled) for each in (a, b))
    out = grouped_mm(left, as_grouped(right, gemm, offs.shape[0]), offs)
    if gemm == "wgrad":
        out = out.flatten(0, 1)
    # In place: the gradient of all experts' weights is among the largest tensors of a step.
    return out if is_scaled else out.mul_(factor_of(a, b))
