# SPDX-License-Identifier: Apache-2.0
"""How Inductor lowers each q2 op: by the emitter of the kernel that `choose` finds. A kernel that
has no emitter is launched, or the op itself is called.

Every op that reads an operand is in the table. For an op without a lowering, Inductor realizes the
operands from the second such op of a process on. Other kernels that read these operands would then
round differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from q2compile.graph.nodes import choice_of
from q2compile.lowering import gathered, gemm, launches
from q2compile.lowering.inductor_kernels import amax, fp8, quantize, rows  # noqa: F401  registers kernels
from q2compile.lowering.member import OpCall
from q2compile.lowering.prologue import fused_launches
from q2compile.runtime_kernels.choice import InGraph
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
from q2compile.runtime_kernels.registry import (
    CUBLASLT_FP4,
    CUDA_BF16,
    INDUCTOR,
    REFERENCE,
    SCALED_MM,
    bound,
)

Emitter = Callable[[OpCall], Any]  # returns the lowered outputs

EMITTERS: dict[str, dict[str, Emitter]] = {
    AMAX: {INDUCTOR: amax.amax},
    QUANTIZE: {INDUCTOR: quantize.inductor_kernel},
    REQUANTIZE: {},
    GEMM: {
        SCALED_MM: gemm.scaled,
        CUDA_BF16: gemm.product,
        CUBLASLT_FP4: gemm.with_alpha,
    },
    GROUPED_GEMM: {CUDA_BF16: gemm.grouped_product},
    GATHER_ROWS: {REFERENCE: gathered.gather_rows},
    SPLIT_SCALES: {},
    DEQUANTIZE: {INDUCTOR: fp8.dequantize},
    TO_E4M3: {},
    TRANSPOSE: {},
    MASKED_UNROTATE: {},
    GEMM_MASKED_UNROTATE: {},
    PADDED_ENDS: {},
}


def register() -> None:
    """Register the table with Inductor."""
    for name, emitters in EMITTERS.items():
        op = getattr(torch.ops.q2, name).default
        register_lowering(op, type_promotion_kind=None)(_lowering(name, emitters))


def _lowering(name: str, emitters: dict[str, Emitter]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        call = OpCall(name, args, kwargs)
        made = fused_launches.prologue(call) if name == QUANTIZE else None
        if made is None:
            emit = emitters.get(_chosen(call), launches.launch) if emitters else launches.launch
            made = emit(call)
        launches.close_group(V.current_node)
        return made

    return lower


def _chosen(call: OpCall) -> str:
    """The name of the kernel of a call, by the fakes of its node."""
    graph = InGraph(quantize.computed_operand(call.args[0]) if call.op == QUANTIZE else None)
    node = V.current_node
    return choice_of(call.op, bound(call.op, node.args, node.kwargs), graph).name
