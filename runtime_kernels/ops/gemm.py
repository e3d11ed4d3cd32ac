"""q2::gemm: the product of two quantised matrices, A B^T.

    gemm(a_codes [M, Kp/2], a_scales, a_global, b_codes [N, Kp/2], b_scales, b_global, bias [N]?,
    a_scheme, b_scheme, dtype) -> [M, N]

An operand whose scheme ends in @bf16 has bf16 [M, Kp] for codes and no scales (schemes.py,
widened).
out = (sum_k a*b) * (a_global * b_global) + bias, accumulated in fp32 and rounded to dtype once.
"""

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.schemes import Scheme, get_scheme


def schemes_of(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme: str, b_scheme: str
) -> tuple[Scheme, Scheme]:
    """The schemes by name.

    Raises:
        ValueError: one is unknown; an operand is no quantised matrix of its scheme.
    """
    specs = get_scheme(a_scheme), get_scheme(b_scheme)
    check_quantized("gemm", a_codes, a_scales, a_global, widened=specs[0].widened)
    check_quantized("gemm", b_codes, b_scales, b_global, widened=specs[1].widened)
    return specs


def checked(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme: str, b_scheme: str
) -> tuple[Scheme, Scheme]:
    """The same for sizes that are known.

    Raises:
        ValueError: the operands are not padded to the same contraction.
    """
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    specs = schemes_of(*operands, a_scheme, b_scheme)
    widths = _contraction(a_codes, specs[0]), _contraction(b_codes, specs[1])
    if widths[0] != widths[1]:
        raise ValueError(
            f"q2::gemm: the operands are padded to contractions of {widths[0]} and {widths[1]}; "
            "quantise both with the same block width and transform."
        )
    return specs


def _contraction(codes: torch.Tensor, spec: Scheme) -> int:
    return codes.shape[1] * (1 if spec.widened else 2)


def fake(a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype):
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    schemes_of(*operands, a_scheme, b_scheme)
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=dtype)


define(
    "gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor b_global, Tensor? bias,"
    " str a_scheme, str b_scheme, ScalarType dtype) -> Tensor",
    fake=fake,
)
