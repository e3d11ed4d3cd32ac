# SPDX-License-Identifier: Apache-2.0
"""Requirements of the GEMM kernels on their operands, as reasons in words."""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.ops.gemm import Factor

ALIGNMENT = 16  # bytes, of every operand and of the rows of codes


def why_not_fp4(a: Factor, b: Factor) -> str | None:
    """None if both operands are codes of one format, otherwise the reason in words."""
    if a.spec.format != b.spec.format:
        return f"the operands are {a.spec.format} and {b.spec.format}"
    dequantized = a.spec.dequantized or b.spec.dequantized
    return "it reads codes, not dequantized operands" if dequantized else None


def without_contraction(
    a: Factor, b: Factor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """An empty sum plus the bias: the product where a size is 0; elsewhere None."""
    if 0 not in (*a.codes.shape, b.codes.shape[0]):
        return None
    out = a.codes.new_zeros((a.codes.shape[0], b.codes.shape[0]), dtype=dtype)
    return out if bias is None else out + bias.to(dtype)


def adds_bias(bias_dtype: torch.dtype | None, dtype: torch.dtype) -> bool:
    """True if a library's GEMM with a result of this type adds a bias of that type to its sums, or
    there is no bias (None)."""
    return bias_dtype is None or (bias_dtype == dtype and dtype.itemsize == 2)


def padded(codes: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Packed codes, zero-padded to [rows, width] and contiguous; unchanged if they have that size.
    Padding codes changes none of the sizes of swizzled scales."""
    if codes.shape != (rows, width):
        codes = pad(codes, (0, width - codes.shape[1], 0, rows - codes.shape[0]))
    return aligned(codes.contiguous())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it does not begin on 16 bytes: a view may begin anywhere."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x
