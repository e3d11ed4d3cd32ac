# SPDX-License-Identifier: Apache-2.0
"""q2::gemm on fp4 tensor cores by cuBLASLt, which multiplies nvfp4 alone.

One launch for the GEMM. In fp32, before the one rounding, it applies alpha, the product of the two
global scales, and adds a bias of the result's 16-bit type. Any other bias is added to an fp32
result. One more launch for alpha, unless a grouped launch of the quantizers has computed it
(quantize/grouped_launch.py). Where N is no multiple of 16, or K of 32, codes are padded and results
cut.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import first_launch, swizzle
from q2compile.runtime_kernels.cuda.gemm.cublaslt import GemmKind, planned, run
from q2compile.runtime_kernels.cuda.gemm.fastest import choose_algorithm
from q2compile.runtime_kernels.cuda.gemm.operands import (
    adds_bias,
    aligned,
    padded,
    why_not_fp4,
    without_contraction,
)
from q2compile.runtime_kernels.cuda.jit.launch import empty
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp4
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.gemm import Factor, alpha_of, checked_gemm, factors_of, finished
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4

_UNIT = 16  # cuBLASLt wants multiples of it: columns, and bytes of codes in a row


def _why_not(*args: Any) -> str | None:
    a, b = factors_of(args)
    if (why := why_no_fp4(capability_of(a.codes.device))) is not None:
        return why
    if a.spec.format != "nvfp4":
        return f"this kernel of cuBLASLt multiplies nvfp4, not {a.spec.format}"
    return why_not_fp4(a, b)


def product_of(
    a_codes: torch.Tensor, b_codes: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> GemmKind:
    """The product that cuBLASLt computes: columns and contraction padded, and an fp32 result if the
    bias is added afterwards."""
    inside = adds_bias(None if bias is None else bias.dtype, dtype)
    return GemmKind(
        a_codes.device.index,
        a_codes.shape[0],
        ceil_div(b_codes.shape[0], _UNIT) * _UNIT,
        2 * ceil_div(a_codes.shape[1], _UNIT) * _UNIT,
        dtype if inside else torch.float32,
        None if bias is None or not inside else bias.dtype,
    )


@cuda_kernel("gemm", CUBLASLT_FP4, _why_not)
def gemm_fp4(*args: Any) -> torch.Tensor:
    """See ops/gemm.py. The first large product by an algorithm, which is the fastest, is compared
    with a BF16 GEMM."""
    (a, b), (bias, *_, dtype) = checked_gemm(args), args[6:]
    if (made := without_contraction(a, b, bias, dtype)) is not None:
        return made
    product = product_of(a.codes, b.codes, bias, dtype)
    columns, inside = b.codes.shape[0], adds_bias(None if bias is None else bias.dtype, dtype)

    with on_device(product.device):
        arguments = _arguments(product, a, b, bias if inside else None)

        def launch() -> torch.Tensor:
            run(product, *arguments)
            out: torch.Tensor = arguments[-1]
            out = out[:, :columns].contiguous() if columns < product.columns else out
            return finished(out, None, None if inside else bias, dtype)

        size = product.rows, product.columns, product.k
        if not first_launch.needed(*size):
            return launch()
        choose_algorithm(product, a.codes.device, arguments)
        of_rows = first_launch.rows_class(product.rows)
        which = planned(product).algorithm, product.dtype, product.bias, of_rows
        return first_launch.launched(GEMM, CUBLASLT_FP4, args, size, which, launch)


def _arguments(product: GemmKind, a: Factor, b: Factor, bias: torch.Tensor | None) -> tuple:
    """The arguments of a product, its result last: all padded, and aligned."""
    missing = product.columns - b.codes.shape[0]
    if bias is not None:
        bias = aligned(pad(bias, (0, missing)) if missing else bias.contiguous())
    sizes = product.rows, product.columns
    return (
        *(
            (padded(each.codes, size, product.k // 2), swizzle.swizzled(each))
            for each, size in zip((a, b), sizes, strict=True)
        ),
        alpha_of(a, b),
        bias,
        empty(sizes, (product.columns, 1), product.dtype),
    )
