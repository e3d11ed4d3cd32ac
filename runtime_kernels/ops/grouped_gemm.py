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

import torch

from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def checked_grouped_gemm(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme: str, b_scheme: str
) -> tuple[Scheme, Scheme]:
    """The schemes by name.

    Raises:
        ValueError: one is unknown; an operand is not a quantized matrix of its scheme.
    """
    specs = get_scheme(a_scheme), get_scheme(b_scheme)
    check_quantized("grouped_gemm", a_codes, a_scales, a_global, dtype=specs[0].codes_dtype)
    check_quantized("grouped_gemm", b_codes, b_scales, b_global, dtype=specs[1].codes_dtype)
    return specs


def as_grouped(b: torch.Tensor, gemm: str, groups: int) -> torch.Tensor:
    """The second operand, dequantized, as grouped_mm takes it."""
    if gemm == "fprop":
        return b.unflatten(0, (groups, -1)).transpose(1, 2)
    return b.unflatten(1, (groups, -1)).permute(1, 2, 0) if gemm == "dgrad" else b.t()


def result_shape(a_codes: torch.Tensor, b_codes: torch.Tensor, groups: int, gemm: str) -> tuple:
    """The shape of the result, also for symbolic sizes."""
    rows, columns = a_codes.shape[0], b_codes.shape[0]
    return {
        "fprop": (rows, columns // groups),
        "dgrad": (rows, columns),
        "wgrad": (groups * rows, columns),
    }[gemm]


def fake(
    a_codes,
    a_scales,
    a_global,
    b_codes,
    b_scales,
    b_global,
    offs,
    a_scheme,
    b_scheme,
    gemm,
    dtype,
):
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    checked_grouped_gemm(*operands, a_scheme, b_scheme)
    return a_codes.new_empty(result_shape(a_codes, b_codes, offs.shape[0], gemm), dtype=dtype)


define(
    "grouped_gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor b_global, Tensor offs,"
    " str a_scheme, str b_scheme, str gemm, ScalarType dtype) -> Tensor",
    fake=fake,
)


@kernel("grouped_gemm", REFERENCE)
def grouped_gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_global: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_global: torch.Tensor,
    offs: torch.Tensor,
    a_scheme: str,
    b_scheme: str,
    gemm: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The reference: see the top of this file."""
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    a_spec, b_spec = checked_grouped_gemm(*operands, a_scheme, b_scheme)
    has_pow2_scale = a_spec.has_pow2_scale and b_spec.has_pow2_scale
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    a = _dequantized(a_codes, a_scales, a_global if has_pow2_scale else None, a_spec, wide)
    b = _dequantized(b_codes, b_scales, b_global if has_pow2_scale else None, b_spec, wide)
    out = torch.ops.q2.grouped_mm(a, as_grouped(b, gemm, offs.shape[0]), offs)
    if gemm == "wgrad":
        out = out.flatten(0, 1)
    return (out if has_pow2_scale else out.mul_(factor_of(a_global, b_global))).to(dtype)


def factor_of(a_global: torch.Tensor, b_global: torch.Tensor) -> torch.Tensor:
    """The product of the global scales, [1], by which a bf16 matrix is multiplied in fp32. A 0-dim
    one would be rounded to bf16 first, on CUDA."""
    return (a_global * b_global).reshape(1)


def _dequantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    spec: Scheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """code * scale, and times the global scale if it is given: [M, Kp]. Dequantized operands
    include it already."""
    if spec.dequantized:
        return codes.to(dtype)
    if global_scale is None:
        global_scale = torch.ones((), dtype=torch.float32, device=codes.device)
    width = spec.packed * codes.shape[1]
    return torch.ops.q2.dequantize(codes, scales, global_scale, spec.name, width, dtype)
