# SPDX-License-Identifier: Apache-2.0
"""q2::gemm of fp8 operands by torch._scaled_mm, on fp8 tensor cores; and of mxfp4 operands where
there are no fp4 ones, as e4m3 elements (ops/to_e4m3.py). Those are exact unless blocks lie more
than 2^14 below the largest of their operand.

The sums are as exact as a BF16 GEMM's (use_fast_accum=False). Fast accumulation, which keeps fewer
bits between instructions, would gain about 2% of a step (examples/benchmarks/KERNEL_LOG.md). The
rows of the second operand are padded to a multiple of 16, and the result is cut.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.gemm.operands import without_contraction
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp8, why_not_in_e4m3
from q2compile.runtime_kernels.ops.gemm import Factor, checked_gemm, factors_of
from q2compile.runtime_kernels.ops.table import TO_E4M3
from q2compile.runtime_kernels.registry import CUDA, SCALED_MM, kernel, warm_up

UNIT = 16  # rows of the second operand, and the contraction, which quantizers pad


def _unsupported(*args: Any) -> str | None:
    a, b = factors_of(args)
    capability = capability_of(a.codes.device)
    for each in (a, b):
        if each.spec.is_tensorwise and not each.spec.form:
            continue
        if each.spec.format != "mxfp4" or each.spec.form or b.global_scale is None:
            return (
                f"it multiplies codes of fp8 and mxfp4, each with its scales, not {each.spec.name}"
            )
        why = why_not_in_e4m3(capability)
        if why is None and choose(TO_E4M3, _named(each)).name != CUDA:
            why = f"kernel {CUDA!r} of q2::{TO_E4M3} does not run"
        if why is not None:
            return why
    return why_no_fp8(capability)


def _named(factor: Factor) -> tuple:
    """The arguments of q2::to_e4m3."""
    return (*factor[:3], factor.spec.name)


def adds_bias(bias_dtype: torch.dtype | None, dtype: torch.dtype) -> bool:
    """True if the GEMM adds a bias of this type to its sums, or there is no bias (None)."""
    return bias_dtype is None or (bias_dtype == dtype and dtype.itemsize == 2)


def _prepare(*args: Any) -> None:
    for each in factors_of(args):
        if not each.spec.is_tensorwise:
            warm_up(TO_E4M3, _named(each))


def _in_e4m3(factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of an operand, and the scale of all."""
    if factor.spec.is_tensorwise:
        return factor.codes, factor.global_scale
    return torch.ops.q2.to_e4m3(*_named(factor))


@kernel("gemm", SCALED_MM, device_type="cuda", unsupported=_unsupported, prepare=_prepare)
def gemm_scaled_mm(*args: Any) -> torch.Tensor:
    """See ops/gemm.py."""
    factors, (bias, *_, dtype) = checked_gemm(args), args[6:]
    if (empty := without_contraction(*factors, bias, dtype)) is not None:
        return empty
    (a, a_scale), (b, b_scale) = map(_in_e4m3, factors)
    rows = b.shape[0]
    inside = adds_bias(None if bias is None else bias.dtype, dtype)
    missing, added = -rows % UNIT, bias if inside else None
    if missing:
        b = pad(b.view(torch.uint8), (0, 0, 0, missing)).view(b.dtype)
        added = None if added is None else pad(added, (0, missing))
    out = torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        a_scale,
        b_scale,
        bias=added,
        out_dtype=dtype if inside else torch.float32,
        use_fast_accum=False,
    )
    out = out[:, :rows].contiguous() if missing else out
    return out if inside else (out + bias).to(dtype)
