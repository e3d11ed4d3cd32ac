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
scale that is a power of two only changes exponents: it is multiplied into the operands, which stay
exact. Any other global scale is applied to the fp32 result.
"""

from collections.abc import Callable

import torch

from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def schemes_of(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme: str, b_scheme: str
) -> tuple[Scheme, Scheme]:
    """The schemes by name.

    Raises:
        ValueError: one is unknown; an operand is not a quantized matrix of its scheme.
    """
    specs = get_scheme(a_scheme), get_scheme(b_scheme)
    check_quantized("gemm", a_codes, a_scales, a_global, dtype=specs[0].codes_dtype)
    check_quantized("gemm", b_codes, b_scales, b_global, dtype=specs[1].codes_dtype)
    return specs


def checked_gemm(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme: str, b_scheme: str
) -> tuple[Scheme, Scheme]:
    """The schemes by name, with the check of sizes that are known.

    Raises:
        ValueError: the operands are not padded to the same contraction.
    """
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    specs = schemes_of(*operands, a_scheme, b_scheme)
    widths = _contraction(a_codes, specs[0]), _contraction(b_codes, specs[1])
    if widths[0] != widths[1]:
        raise ValueError(
            f"q2::gemm: the operands are padded to contractions of {widths[0]} and {widths[1]}; "
            "quantize both with the same block width and transform."
        )
    return specs


def _contraction(codes: torch.Tensor, spec: Scheme) -> int:
    return codes.shape[1] * spec.packed


def fake(a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype):
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    schemes_of(*operands, a_scheme, b_scheme)
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=dtype)


define(
    "gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor? b_global, Tensor? bias,"
    " str a_scheme, str b_scheme, ScalarType dtype) -> Tensor",
    fake=fake,
)


@kernel("gemm", REFERENCE)
def gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_global: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_global: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_scheme: str,
    b_scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The reference: see the top of this file."""
    a_spec, b_spec = checked_gemm(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    return product(*operands, bias, a_spec, b_spec, dtype, _of_codes)


Dequantize = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, Scheme, torch.dtype], torch.Tensor
]


def product(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_global: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_global: torch.Tensor | None,
    bias: torch.Tensor | None,
    a_spec: Scheme,
    b_spec: Scheme,
    dtype: torch.dtype,
    dequantize: Dequantize,
) -> torch.Tensor:
    """The product by torch. ``dequantize`` makes the operands from codes, scales, a global scale or
    None, the scheme and the dtype."""
    bf16 = dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)
    if bf16 and a_spec.has_pow2_scale and b_spec.has_pow2_scale and b_global is not None:
        a = dequantize(a_codes, a_scales, a_global, a_spec, dtype)
        b = dequantize(b_codes, b_scales, b_global, b_spec, dtype)
        # addmm adds the bias to the fp32 sums, before the one rounding.
        return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())
    a = dequantize(a_codes, a_scales, None, a_spec, torch.float32)
    b = dequantize(b_codes, b_scales, None, b_spec, torch.float32)
    out = _mm_fp32(a, b).mul_(alpha_of(a_global, b_global))
    if bias is not None:
        out += bias
    return out.to(dtype)


def _of_codes(codes, scales, global_scale, spec: Scheme, dtype: torch.dtype) -> torch.Tensor:
    values = scaled_codes(codes, scales, spec)
    return (values if global_scale is None else values.mul_(global_scale)).to(dtype)


def alpha_of(a_global: torch.Tensor, b_global: torch.Tensor | None) -> torch.Tensor:
    """The factor of the sums."""
    return a_global if b_global is None else a_global * b_global


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B^T in fp32 of operands that are exact in bf16. Torch has a bf16 product with an fp32
    result on CUDA only; a plain fp32 one there may be TF32, by the user's choice."""
    if a.is_cuda and a.numel() and b.numel():
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return a @ b.t()
