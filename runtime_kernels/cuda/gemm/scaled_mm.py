# SPDX-License-Identifier: Apache-2.0
"""q2::gemm of fp8 operands by torch._scaled_mm, on fp8 tensor cores; and of mxfp4 operands where
there are no fp4 ones, as e4m3 elements (ops/to_e4m3.py). Those are exact unless blocks lie more
than 2^14 below the largest of their operand.

The sums of q2::gemm are as exact as a BF16 GEMM's (use_fast_accum=False). Fast accumulation, which
keeps fewer bits between instructions, would gain about 2% of a step
(examples/benchmarks/KERNEL_LOG.md). The rows of the second operand are padded to a multiple of 16,
and the result is cut.

q2::grouped_gemm of fp8 operands is torch._scaled_grouped_mm, on a Hopper: one launch, and the host
does not wait for the device. It uses fast accumulation, because with exact sums torch's kernel
takes 2.2 times BF16's time for 64 experts, and 0.75 of it with fast accumulation. The relative
error of a result is 0.0017 to 0.0021 (0.0017 with exact sums; KERNEL_LOG.md, "FP8"); rounding both
operands to fp8 causes 0.037.

The grouped product takes a scale for each row of an operand. Here all are the tensor's, powers of
two, so only the sums differ from a BF16 product's. torch 2.11 to 2.15
(GroupedBlas.cpp, GroupMMCommon.cuh) ask that sizes and the ends of contracted groups be multiples
of 16, and return bf16. No contracted group may be empty, which CUTLASS cannot describe to the
hardware, so wgrad's are filled (ops/padded_ends.py).
"""

from typing import Any

import torch
from torch.nn.functional import pad

from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.gemm.grouped_mm import zero_rows
from q2compile.runtime_kernels.cuda.gemm.operands import adds_bias, without_contraction
from q2compile.runtime_kernels.cuda.jit.launch import unsupported
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp8, why_not_in_e4m3
from q2compile.runtime_kernels.kernel_states import assumed_capability
from q2compile.runtime_kernels.ops.gemm import Factor, checked_factors, checked_gemm, factors_of
from q2compile.runtime_kernels.ops.grouped_gemm import as_grouped, result_shape
from q2compile.runtime_kernels.ops.table import GROUPED_GEMM, TO_E4M3
from q2compile.runtime_kernels.registry import CUDA, SCALED_GROUPED_MM, SCALED_MM, kernel

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


def _in_e4m3(factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of an operand, and the scale of all."""
    if factor.spec.is_tensorwise:
        return factor.codes, factor.global_scale
    return torch.ops.q2.to_e4m3(*_named(factor))


@kernel("gemm", SCALED_MM, device_type="cuda", unsupported=_unsupported)
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


# ---- grouped ----

_MOST_GROUPS = 1023  # torch prepares them by one thread block


def _grouped_unsupported(*args: Any) -> str | None:
    (a, b), (offs, *_, gemm, dtype) = factors_of(args), args[6:]
    for each in (a, b):
        if not each.spec.is_tensorwise or each.spec.form:
            return f"it multiplies codes of fp8, not {each.spec.name}"
    if (capability := capability_of(a.codes.device)) != (9, 0):
        return "torch has it for compute capability 9.0, this is {}.{}".format(*capability)
    if dtype != torch.bfloat16:
        return f"its result is bfloat16, not {dtype}"
    groups = offs.shape[0]
    if not isinstance(groups, int) or groups > _MOST_GROUPS:
        return f"torch's grouped product takes at most {_MOST_GROUPS} groups, not {groups}"
    sizes = {
        "fprop": (a.codes.shape[1], b.codes.shape[0] // groups),
        "dgrad": (a.codes.shape[1], b.codes.shape[0]),
        "wgrad": (b.codes.shape[0],),
    }[gemm]
    if odd := [size for size in sizes if not isinstance(size, int) or size % UNIT]:
        return f"its columns and contraction must be multiples of {UNIT}, not {odd[0]}"
    return None if assumed_capability() else unsupported(a.codes.device.index)


@kernel(
    GROUPED_GEMM,
    SCALED_GROUPED_MM,
    device_type="cuda",
    unsupported=_grouped_unsupported,
)
def scaled_grouped_mm(*args: Any) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    factors, (offs, *_, gemm, dtype) = checked_factors(GROUPED_GEMM, args), args[6:]
    groups, contracts = offs.shape[0], gemm == "wgrad"
    a = factors[0].codes.contiguous()
    b = as_grouped(factors[1].codes.contiguous(), gemm, groups)
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(result_shape(*factors, groups, gemm), dtype=dtype)
    count = groups if contracts else 1
    a_scale = factors[0].global_scale.expand(count * a.shape[0]).contiguous()
    b_scale = factors[1].global_scale.expand(count * b.shape[-1]).contiguous()
    out = torch._scaled_grouped_mm(
        a,
        b,
        a_scale,
        b_scale if contracts else b_scale.expand(groups, -1),
        offs=offs,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    if contracts:
        return out.flatten(0, 1)
    zero_rows(out, offs)
    return out
