# SPDX-License-Identifier: Apache-2.0
"""q2::gemm: the product of two quantized matrices, A B^T.

    gemm(a_codes [M, Kp/2], a_scales, a_global, b_codes [N, Kp/2], b_scales, b_global?, bias [N]?,
    a_scheme, b_scheme, dtype) -> [M, N]

An operand whose scheme ends in @bf16 has bf16 [M, Kp] for codes and no scales (schemes.py,
dequantized).
out = (sum_k a*b) * (a_global * b_global) + bias, accumulated in fp32 and rounded to dtype once.
Without b_global, a_global is the product of both.

The reference is one ordinary product of dequantized operands. An operand without its global scale,
code * scale, has at most 6 significant bits, so it is exact in bf16 (8 bits), and the product on
any bf16 tensor core with fp32 accumulation is the 4-bit GEMM up to the order of the sums. A global
scale that is a power of two only changes exponents: for a result in bf16 it is multiplied into the
operands, which stay exact. Otherwise global scales are applied to the fp32 result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import define


class Factor(NamedTuple):
    """An operand of a GEMM. Where b has no global scale, a has the product of both."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: Any
    spec: Scheme

    @property
    def contraction(self) -> int:
        """Elements in a row, with the padding."""
        return self.codes.shape[1] * self.spec.packed


def factors_of(args: Sequence[Any]) -> tuple[Factor, Factor]:
    """The operands of a GEMM, plain, grouped or with an epilogue, from all of its arguments.

    Raises:
        ValueError: a scheme is unknown.
    """
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, _, *schemes = args[:9]
    a, b = map(get_scheme, schemes)
    return Factor(a_codes, a_scales, a_global, a), Factor(b_codes, b_scales, b_global, b)


def checked_factors(op: str, args: Sequence[Any]) -> tuple[Factor, Factor]:
    """The operands, which are checked except for their sizes.

    Raises:
        ValueError: a scheme is unknown.
    """
    found = factors_of(args)
    for codes, scales, global_scale, spec in found:
        check_quantized(op, codes, scales, global_scale, dtype=spec.codes_dtype)
    return found


def checked_gemm(args: Sequence[Any]) -> tuple[Factor, Factor]:
    """The operands of q2::gemm, which are checked: they are padded to the same contraction."""
    a, b = checked_factors("gemm", args)
    widths = a.contraction, b.contraction
    assert widths[0] == widths[1], f"q2::gemm of contractions of {widths[0]} and {widths[1]}"
    return a, b


def fake(*args: Any) -> torch.Tensor:
    a, b = checked_factors("gemm", args)
    return a.codes.new_empty((a.codes.shape[0], b.codes.shape[0]), dtype=args[-1])


@define(
    "gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor? b_global, Tensor? bias,"
    " str a_scheme, str b_scheme, ScalarType dtype) -> Tensor",
    fake=fake,
)
def gemm(*args: Any) -> torch.Tensor:
    """The reference: see the top of this file."""
    return product(args, _dequantized)


def product(
    args: Sequence[Any], dequantize: Callable[[Factor, torch.dtype], torch.Tensor]
) -> torch.Tensor:
    """The product by torch. ``dequantize`` makes an operand, without its global scale if that is
    None."""
    (a, b), (bias, *_, dtype) = checked_gemm(args), args[6:]
    bf16 = dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)
    if bf16 and has_pow2_scales(a, b):
        left, right = dequantize(a, dtype), dequantize(b, dtype)
        # addmm adds the bias to the fp32 sums, before the one rounding.
        return left @ right.t() if bias is None else torch.addmm(bias, left, right.t())
    left, right = (dequantize(each._replace(global_scale=None), torch.float32) for each in (a, b))
    return finished(_mm_fp32(left, right), alpha_of(a, b), bias, dtype)


def finished(
    out: torch.Tensor, alpha: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """(out * alpha + bias) of fp32 sums, which are overwritten, rounded to dtype once."""
    if alpha is not None:
        out.mul_(alpha)
    if bias is not None:
        out.add_(bias)
    return out.to(dtype)


def _dequantized(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales, global_scale, spec = factor
    values = scaled_codes(codes, scales, spec)
    return (values if global_scale is None else values.mul_(global_scale)).to(dtype)


def has_pow2_scales(a: Factor, b: Factor) -> bool:
    """True if each operand has its own global scale and it is a power of two, so that multiplying
    by it is exact."""
    return a.spec.has_pow2_scale and b.spec.has_pow2_scale and b.global_scale is not None


def alpha_of(a: Factor, b: Factor) -> torch.Tensor:
    """The factor of the sums."""
    return a.global_scale if b.global_scale is None else a.global_scale * b.global_scale


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B^T in fp32 of operands that are exact in bf16. Torch has a bf16 product with an fp32
    result on CUDA only; a plain fp32 one there may be TF32, by the user's choice."""
    if a.is_cuda and a.numel() and b.numel():
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()
