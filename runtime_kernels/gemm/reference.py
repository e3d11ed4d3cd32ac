"""q2::gemm in torch: 4-bit operands widened without error, then one ordinary matrix product.

An operand without its global scale, code * scale, has at most 6 significant bits, so it is exact in
bf16 (8 bits), and the product on any bf16 tensor core with fp32 accumulation is the 4-bit GEMM up
to the order of the sums. A global scale that is a power of two only moves exponents: folded into
the operands it leaves them exact, and nothing remains to be done after the product. Any other
global scale is applied to the fp32 result.
"""

import torch

from q2compile.runtime_kernels.dequantize.reference import scaled_codes
from q2compile.runtime_kernels.gemm.op import checked
from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("gemm", REFERENCE)
def gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_global: torch.Tensor,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_global: torch.Tensor,
    bias: torch.Tensor | None,
    a_scheme: str,
    b_scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See gemm/op.py."""
    a_spec, b_spec = checked(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    a = scaled_codes(a_codes, a_scales, a_spec)
    b = scaled_codes(b_codes, b_scales, b_spec)
    bf16 = dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)
    if bf16 and a_spec.folds and b_spec.folds:
        a, b = a.mul_(a_global).to(dtype), b.mul_(b_global).to(dtype)
        # addmm adds the bias to the fp32 sums, before the one rounding.
        return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())
    out = _mm_fp32(a, b).mul_(a_global * b_global)
    if bias is not None:
        out += bias
    return out.to(dtype)


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B^T in fp32 of operands that are exact in bf16. Torch has a bf16 product with an fp32
    result on CUDA only; a plain fp32 one there may be TF32, by the user's choice."""
    if a.is_cuda and a.numel() and b.numel():
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    return a @ b.t()
