# SPDX-License-Identifier: Apache-2.0
"""q2::gemm of fp8 operands by torch._scaled_mm, on fp8 tensor cores.

The sums are as exact as a BF16 GEMM's (use_fast_accum=False). Fast accumulation, which keeps fewer
bits between instructions, would gain about 2% of a step (examples/benchmarks/KERNEL_LOG.md). The
rows of the second operand are padded to a multiple of 16, and the result is cut.
"""

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.cuda.gemm.operands import without_contraction
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp8
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.gemm import checked_gemm
from q2compile.runtime_kernels.registry import SCALED_MM, kernel

UNIT = 16  # rows of the second operand, and the contraction, which quantizers pad


def _unsupported(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    for scheme in map(get_scheme, (a_scheme, b_scheme)):
        if scheme.codes_dtype != torch.float8_e4m3fn:
            return f"it multiplies fp8 codes, not {scheme.name}"
    return why_no_fp8(capability_of(a_codes.device))


def adds_bias(bias_dtype: torch.dtype | None, dtype: torch.dtype) -> bool:
    """True if the GEMM adds a bias of this type to its sums, or there is no bias (None)."""
    return bias_dtype is None or (bias_dtype == dtype and dtype.itemsize == 2)


@kernel("gemm", SCALED_MM, device_type="cuda", unsupported=_unsupported)
def gemm_scaled_mm(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py."""
    checked_gemm(a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme)
    rows = b_codes.shape[0]
    if 0 in (*a_codes.shape, rows):
        return without_contraction(a_codes, b_codes, bias, dtype)
    inside = adds_bias(None if bias is None else bias.dtype, dtype)
    missing, added = -rows % UNIT, bias if inside else None
    if missing:
        b_codes = pad(b_codes.view(torch.uint8), (0, 0, 0, missing)).view(b_codes.dtype)
        added = None if added is None else pad(added, (0, missing))
    out = torch._scaled_mm(
        a_codes.contiguous(),
        b_codes.contiguous().t(),
        a_global,
        b_global,
        bias=added,
        out_dtype=dtype if inside else torch.float32,
        use_fast_accum=False,
    )
    out = out[:, :rows].contiguous() if missing else out
    return out if inside else (out + bias).to(dtype)
