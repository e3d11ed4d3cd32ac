# SPDX-License-Identifier: Apache-2.0
"""How Inductor lowers each q2 op: steps that are tried in order. The first that returns a result is
the lowering of that node.

Every op that reads an operand is in the table. For an op without a lowering, Inductor realizes the
operands from the second such op of a process on. Other kernels that read these operands would then
round differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from q2compile.lowering import gathered, gemm, launches
from q2compile.lowering.inductor_kernels import amax, fp8, quantize
from q2compile.lowering.member import OpCall
from q2compile.lowering.prologue import fused_launches
from q2compile.runtime_kernels.ops.table import (
    AMAX,
    DEQUANTIZE,
    GATHER_ROWS,
    GEMM,
    GEMM_MASKED_UNROTATE,
    GROUPED_GEMM,
    MASKED_UNROTATE,
    PADDED_ENDS,
    QUANTIZE,
    REQUANTIZE,
    SPLIT_SCALES,
    TO_E4M3,
    TRANSPOSE,
)

Step = Callable[[OpCall], Any]  # the lowered outputs; None: the next step is tried

LOWERINGS: dict[str, tuple[Step, ...]] = {
    AMAX: (amax.amax, launches.launch),
    QUANTIZE: (
        fused_launches.prologue,  # our kernel computes its operand
        quantize.inductor_kernel,  # Inductor's kernel computes both
        launches.launch,  # our kernel reads its operand, or the reference does
    ),
    REQUANTIZE: (launches.launch,),
    GEMM: (gemm.scaled, gemm.product, gemm.with_alpha, launches.launch),
    GROUPED_GEMM: (gemm.grouped_product, launches.launch),
    GATHER_ROWS: (gathered.gather_rows,),
    SPLIT_SCALES: (launches.launch,),
    DEQUANTIZE: (fp8.dequantize, launches.launch),
    TO_E4M3: (launches.launch,),
    TRANSPOSE: (fp8.transpose, launches.launch),
    MASKED_UNROTATE: (launches.launch,),
    GEMM_MASKED_UNROTATE: (launches.launch,),
    PADDED_ENDS: (launches.launch,),
}


def register() -> None:
    """Register the table with Inductor."""
    for name, steps in LOWERINGS.items():
        op = getattr(torch.ops.q2, name).default
        register_lowering(op, type_promotion_kind=None)(_lowering(name, steps))


def _lowering(name: str, steps: tuple[Step, ...]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        call = OpCall(name, args, kwargs)
        made = next(found for step in steps if (found := step(call)) is not None)
        launches.close_group(V.current_node)
        return made

    return lower
