# SPDX-License-Identifier: Apache-2.0
"""q2::dequantize and the GEMM that begins with it: csrc/dequantize.h, then torch's own product of
the operands, as in the references."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch

from q2compile.runtime_kernels.cpu import kernels
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import plain_scales
from q2compile.runtime_kernels.ops import gemm as gemm_op
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.ops.table import DEQUANTIZE, GEMM


def dequantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: Scheme,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The first `columns` columns of a quantized matrix, dequantized."""
    rows, width = codes.shape[0], 2 * codes.shape[1]
    codes = codes.contiguous()
    scales = plain_scales(scales, rows, width, scheme).contiguous()
    written = dtype if dtype in kernels.TYPES else torch.float32
    out = codes.new_empty((rows, columns), dtype=written)
    parts = codes.data_ptr(), scales.data_ptr(), kernels.pointer(global_scale), out.data_ptr()
    how = kernels.TYPES[written], scheme.format == "mxfp4", scheme.block[0]
    kernels.entry("q2_dequantize")(byref(kernels.Quantized(*parts, rows, width, columns, *how)))
    return out.to(dtype)


def _no_dequantize(codes, scales, global_scale, scheme, cols, dtype) -> str | None:
    if not get_scheme(scheme).has_block_scales:
        return "PyTorch's own operations convert codes without block scales"
    return None


@kernels.cpu_kernel(DEQUANTIZE, _no_dequantize)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ops/dequantize.py."""
    check_quantized("dequantize", codes, scales, global_scale)
    return dequantized(codes, scales, global_scale, get_scheme(scheme), cols, dtype)


def _no_gemm(*args: Any) -> str | None:
    if not all(each.spec.has_block_scales for each in gemm_op.factors_of(args)):
        return "operands without block scales need only PyTorch's own matmul"
    return None


@kernels.cpu_kernel(GEMM, _no_gemm)
def gemm(*args: Any) -> torch.Tensor:
    """See ops/gemm.py, whose product this is."""
    return gemm_op.product(
        args, lambda factor, dtype: dequantized(*factor, factor.contraction, dtype)
    )
