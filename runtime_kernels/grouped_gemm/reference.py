"""q2::grouped_gemm in torch: the operands widened without error, then one grouped product.

Code * scale is exact in bf16, and so is a global scale that is a power of two on top. Any other is
applied to the result, which bf16 has by then rounded once more: torch has no grouped product of
bf16 operands that returns its fp32 sums. Results of another dtype are computed in fp32.
"""

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.schemes import get_scheme


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
    """See grouped_gemm/op.py."""
    check_quantized("grouped_gemm", a_codes, a_scales, a_global)
    check_quantized("grouped_gemm", b_codes, b_scales, b_global)
    folds = get_scheme(a_scheme).folds and get_scheme(b_scheme).folds
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    a = _widened(a_codes, a_scales, a_global if folds else None, a_scheme, wide)
    b = _widened(b_codes, b_scales, b_global if folds else None, b_scheme, wide)
    groups = offs.shape[0]
    if gemm == "fprop":
        b = b.unflatten(0, (groups, -1)).transpose(1, 2)
    elif gemm == "dgrad":
        b = b.unflatten(1, (groups, -1)).permute(1, 2, 0)
    else:
        b = b.t()
    out = torch.ops.q2.grouped_mm(a, b, offs)
    if gemm == "wgrad":
        out = out.flatten(0, 1)
    return (out if folds else out * (a_global * b_global)).to(dtype)


def _widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """code * scale, and times the global scale if it is given: [M, Kp]."""
    if global_scale is None:
        global_scale = torch.ones((), device=codes.device)
    width = 2 * codes.shape[1]
    return torch.ops.q2.dequantize(codes, scales, global_scale, scheme, width, dtype)
