# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm: the products of quantized operands, with a weight for each group of rows.

    grouped_gemm(a_codes, a_scales, a_global, b_codes, b_scales, b_global, offs [E], a_scheme,
    b_scheme, gemm, dtype) -> matrix

Both operands are quantized along the contraction, or dequantized (schemes that end in @bf16). E
weights w [E, N, K] form one matrix, and so do their gradients; ``gemm`` says how:

    gemm      a         b              result
    "fprop"   x [T, K]  w [E * N, K]   y [T, N]       contracts K, weight after weight
    "dgrad"   dy [T, N] w [K, E * N]   dx [T, K]      contracts N of each weight, beside each other
    "wgrad"   dy [N, T] x [K, T]       dw [E * N, K]  contracts T, group after group

``offs``: int32 ends of the groups along T. Where T is contracted, groups must be whole chunks of
128 (padded_ends), and where N is, each weight's whole blocks. Rows of no group, from offs[E - 1]
on, give zero.

The reference is one grouped product of dequantized operands. Code * scale is exact in bf16, also
times a global scale that is a power of two. Any other global scale is applied to the result, after
a second rounding to bf16: torch has no grouped product of bf16 operands that returns its fp32 sums.
Results of another dtype are computed in fp32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from q2compile.runtime_kernels.ops.gemm import Factor, alpha_of, checked_factors, has_pow2_scales
from q2compile.runtime_kernels.ops.table import GROUPED_GEMM
from q2compile.runtime_kernels.registry import define


def as_grouped(b: torch.Tensor, gemm: str, groups: int) -> torch.Tensor:
    """The second operand, dequantized, as grouped_mm takes it."""
    if gemm == "fprop":
        return b.unflatten(0, (groups, -1)).transpose(1, 2)
    return b.unflatten(1, (groups, -1)).permute(1, 2, 0) if gemm == "dgrad" else b.t()


def result_shape(a: Factor, b: Factor, groups: int, gemm: str) -> tuple:
    """The shape of the result, also for symbolic sizes."""
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    return {
        "fprop": (rows, columns // groups),
        "dgrad": (rows, columns),
        "wgrad": (groups * rows, columns),
    }[gemm]


def fake(*args: Any) -> torch.Tensor:
    (a, b), (offs, *_, gemm, dtype) = checked_factors(GROUPED_GEMM, args), args[6:]
    return a.codes.new_empty(result_shape(a, b, offs.shape[0], gemm), dtype=dtype)


@define(
    "grouped_gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor b_global, Tensor offs,"
    " str a_scheme, str b_scheme, str gemm, ScalarType dtype) -> Tensor",
    fake=fake,
)
def grouped_gemm(*args: Any) -> torch.Tensor:
    """The reference: see the top of this file."""
    wide = torch.bfloat16 if args[-1] == torch.bfloat16 else torch.float32
    return grouped_product(args, partial(_dequantized, dtype=wide), torch.ops.q2.grouped_mm)


def grouped_product(
    args: Sequence[Any],
    dequantize: Callable[[Factor, bool], torch.Tensor],
    multiply: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The products by torch.

    dequantize: makes an operand of a factor, and of whether its global scale is multiplied in.
    multiply: as q2::grouped_mm.
    """
    (a, b), (offs, *_, gemm, dtype) = checked_factors(GROUPED_GEMM, args), args[6:]
    is_scaled = has_pow2_scales(a, b)
    left, right = (dequantize(each, is_scaled) for each in (a, b))
    out = multiply(left, as_grouped(right, gemm, offs.shape[0]), offs)
    if gemm == "wgrad":
        out = out.flatten(0, 1)
    if not is_scaled:
        # In place: the gradient of all experts' weights is among the largest tensors of a step. By
        # a tensor [1] it is multiplied in fp32; one of no dimensions would be rounded to bf16.
        out.mul_(alpha_of(a, b).reshape(1))
    return out.to(dtype)


def _dequantized(factor: Factor, is_scaled: bool, dtype: torch.dtype) -> torch.Tensor:
    """code * scale, and times the global scale if is_scaled: [M, Kp]. Dequantized operands include
    it already."""
    codes, scales, global_scale, spec = factor
    if spec.dequantized:
        return codes.to(dtype)
    scale = global_scale if is_scaled else None
    return torch.ops.q2.dequantize(codes, scales, scale, spec.name, factor.contraction, dtype)
