# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm of fp8 operands by torch._scaled_grouped_mm, on the fp8 tensor cores of a
Hopper: one launch, and the host does not wait for the device.

torch takes a scale for each row of an operand. Here all are the tensor's, powers of two, so only
the order of the sums differs from a BF16 product's (use_fast_accum=False, see scaled_mm.py). The
rules of torch 2.11 to 2.15, in GroupedBlas.cpp and GroupMMCommon.cuh: sizes and the ends of
contracted groups are multiples of 16, and the result is bf16. No contracted group may be empty,
which CUTLASS cannot describe to the hardware, so wgrad's are filled (ops/padded_ends.py).
"""

from typing import Any

import torch

from q2compile.runtime_kernels.cuda.gemm.grouped_mm import zero_rows, zero_rows_launch
from q2compile.runtime_kernels.cuda.gemm.scaled_mm import UNIT
from q2compile.runtime_kernels.cuda.jit.launch import unsupported
from q2compile.runtime_kernels.cuda.jit.limits import capability_of
from q2compile.runtime_kernels.kernel_states import assumed_capability
from q2compile.runtime_kernels.ops.gemm import checked_factors, factors_of
from q2compile.runtime_kernels.ops.grouped_gemm import as_grouped, result_shape
from q2compile.runtime_kernels.registry import SCALED_GROUPED_MM, kernel

_MOST_GROUPS = 1023  # torch prepares them by one thread block


def _unsupported(*args: Any) -> str | None:
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


def _prepare(*args: Any) -> None:
    zero_rows_launch().warm_up(args[0].device.index)


@kernel(
    "grouped_gemm",
    SCALED_GROUPED_MM,
    device_type="cuda",
    unsupported=_unsupported,
    prepare=_prepare,
)
def scaled_grouped_mm(*args: Any) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    factors, (offs, *_, gemm, dtype) = checked_factors("grouped_gemm", args), args[6:]
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
        use_fast_accum=False,
    )
    if contracts:
        return out.flatten(0, 1)
    zero_rows(out, offs)
    return out
