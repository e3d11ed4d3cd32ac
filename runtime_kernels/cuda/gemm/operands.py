# SPDX-License-Identifier: Apache-2.0
"""Requirements of the GEMM kernels on their operands, as reasons in words; and their epilogue."""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.numerics.schemes import get_scheme

ALIGNMENT = 16  # bytes, of every operand and of the rows of codes


def two_formats(a_scheme: str, b_scheme: str) -> str | None:
    formats = get_scheme(a_scheme).format, get_scheme(b_scheme).format
    return None if formats[0] == formats[1] else f"the operands are {formats[0]} and {formats[1]}"


def reads_codes(a_scheme: str, b_scheme: str) -> str | None:
    dequantized = get_scheme(a_scheme).dequantized or get_scheme(b_scheme).dequantized
    return "it reads codes, not dequantized operands" if dequantized else None


def without_contraction(
    a_codes: torch.Tensor, b_codes: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """An empty sum plus the bias: the product where a size is 0."""
    out = a_codes.new_zeros((a_codes.shape[0], b_codes.shape[0]), dtype=dtype)
    return out if bias is None else out + bias.to(dtype)


def finished(
    out: torch.Tensor, alpha: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """(out * alpha + bias) of fp32 sums, which are overwritten, rounded to dtype once."""
    if alpha is not None:
        out.mul_(alpha)
    if bias is not None:
        out.add_(bias)
    return out.to(dtype)


def padded(codes: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Packed codes, zero-padded to [rows, width] and contiguous; unchanged if they have that size.
    Padding codes changes none of the sizes of swizzled scales."""
    if codes.shape != (rows, width):
        codes = pad(codes, (0, width - codes.shape[1], 0, rows - codes.shape[0]))
    return aligned(codes.contiguous())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it does not begin on 16 bytes: a view may begin anywhere."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x
