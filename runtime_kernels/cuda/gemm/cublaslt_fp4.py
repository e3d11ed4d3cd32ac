# SPDX-License-Identifier: Apache-2.0
"""q2::gemm on fp4 tensor cores by cuBLASLt, which multiplies nvfp4 alone.

One launch for the GEMM. In fp32, before the one rounding, it applies alpha, the product of the two
global scales, and adds a bias of the result's 16-bit type. Any other bias is added to an fp32
result. One more launch for alpha, unless a grouped launch of the quantizers has computed it
(quantize/grouped_launch.py). Where N is no multiple of 16, or K of 32, codes are padded and results
cut.
"""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import swizzle
from q2compile.runtime_kernels.cuda.gemm.cublaslt import GemmKind, planned, ready, run
from q2compile.runtime_kernels.cuda.gemm.fastest import choose_algorithm
from q2compile.runtime_kernels.cuda.gemm.first_launch import (
    Factor,
    begin,
    compare,
    marked,
    needed,
    rows_class,
)
from q2compile.runtime_kernels.cuda.gemm.operands import (
    aligned,
    finished,
    padded,
    reads_codes,
    two_formats,
    without_contraction,
)
from q2compile.runtime_kernels.cuda.jit.launch import empty
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp4
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.gemm import alpha_of, checked_gemm
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4

_UNIT = 16  # cuBLASLt wants multiples of it: columns, and bytes of codes in a row


def _why_not(*args) -> str | None:
    schemes = args[7:9]
    if (why := why_no_fp4(capability_of(args[0].device))) is not None:
        return why
    if (format := get_scheme(schemes[0]).format) != "nvfp4":
        return f"this kernel of cuBLASLt multiplies nvfp4, not {format}"
    return two_formats(*schemes) or reads_codes(*schemes)


def _prepare_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> None:
    swizzle.prepare(a_codes.device.index, a_scheme, b_scheme)
    ready(product_of(a_codes, b_codes, bias, dtype))


def product_of(
    a_codes: torch.Tensor, b_codes: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> GemmKind:
    """The product that cuBLASLt computes: columns and contraction padded, and an fp32 result if the
    bias is added afterwards."""
    inside = takes(bias, dtype)
    return GemmKind(
        a_codes.device.index,
        a_codes.shape[0],
        ceil_div(b_codes.shape[0], _UNIT) * _UNIT,
        2 * ceil_div(a_codes.shape[1], _UNIT) * _UNIT,
        dtype if inside else torch.float32,
        None if bias is None or not inside else bias.dtype,
    )


def takes(bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether cuBLASLt adds this bias, if there is one, to a result of this type."""
    return bias is None or (bias.dtype == dtype and dtype.itemsize == 2)


@cuda_kernel("gemm", CUBLASLT_FP4, _why_not, _prepare_fp4)
def gemm_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py."""
    a_spec, b_spec = checked_gemm(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    rows, columns = a_codes.shape[0], b_codes.shape[0]
    if 0 in (*a_codes.shape, columns):
        return without_contraction(a_codes, b_codes, bias, dtype)
    product = product_of(a_codes, b_codes, bias, dtype)
    call = a_codes, a_scales, a_global, b_codes, b_scales, b_global
    with on_device(a_codes.device.index):
        arguments = _arguments(
            product,
            (a_codes, swizzle.swizzled(a_scales, rows, a_spec), a_global),
            (b_codes, swizzle.swizzled(b_scales, columns, b_spec), b_global),
            bias if takes(bias, dtype) else None,
        )
        first = _first(product, a_codes.device, arguments, (*call, bias, a_scheme, b_scheme, dtype))
        with marked(first):
            run(product, *arguments)
            out = arguments[-1]
            out = out[:, :columns].contiguous() if columns < product.columns else out
            out = finished(out, None, None if takes(bias, dtype) else bias, dtype)
            if first is not None:
                a = Factor(a_codes, a_scales, a_global, a_spec)
                compare(first, out, a, Factor(b_codes, b_scales, b_global, b_spec), bias)
    return out


def _first(
    product: GemmKind, device: torch.device, arguments: tuple, call: tuple
) -> Request | None:
    """The first large product by an algorithm, which is the fastest, is compared with a BF16 GEMM.

    arguments: of the product.  call: the arguments of the op.

    Raises:
        WrongError: it was wrong, or did not end.
    """
    if not needed(product.rows, product.columns, product.k):
        return None
    choose_algorithm(product, device, arguments)
    which = planned(product).algorithm, product.dtype, product.bias
    return begin(GEMM, CUBLASLT_FP4, device, *which, rows_class(product.rows), call=call)


def _arguments(product: GemmKind, a, b, bias: torch.Tensor | None) -> tuple:
    """The arguments of a product, its result last: all padded, and aligned.

    a and b: codes, swizzled scales, global scale.
    """
    (a_codes, a_scales, a_global), (b_codes, b_scales, b_global) = a, b
    missing = product.columns - b_codes.shape[0]
    if bias is not None:
        bias = aligned(pad(bias, (0, missing)) if missing else bias.contiguous())
    return (
        (padded(a_codes, product.rows, product.k // 2), a_scales),
        (padded(b_codes, product.columns, product.k // 2), b_scales),
        alpha_of(a_global, b_global),
        bias,
        empty((product.rows, product.columns), (product.columns, 1), product.dtype),
    )
