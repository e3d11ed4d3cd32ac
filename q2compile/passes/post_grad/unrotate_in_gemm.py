# SPDX-License-Identifier: Apache-2.0
"""Mask and rotate QuEST's gradient back in the epilogue of its GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from q2compile.graph.nodes import choice_of, is_q2, named_arguments, q2_nodes
from q2compile.runtime_kernels.ops.table import GEMM, GEMM_MASKED_UNROTATE, MASKED_UNROTATE
from q2compile.runtime_kernels.registry import TRITON_FP4

_OP = torch.ops.q2.gemm_masked_unrotate.default


def unrotate_in_gemm_pass(graph: fx.Graph) -> int:
    """A product that is masked and rotated back is not written before.

    before                                            after
        y = gemm(*a, *b, None, S, S, bf16)                dx = gemm_masked_unrotate(*a, *b, m,
        dx = masked_unrotate(y, m, "h32")                                     S, S, "h32", bf16)

    This saves a launch, and the 4 bytes per element of writing and reading y. By data sheet those
    take longer than what the epilogue computes more, on 10.x and on 12.x
    (examples/benchmarks/KERNEL_LOG.md, "Launches and GEMMs").

    Preconditions: nothing else reads y, which has no bias; Triton's kernel serves the GEMM, and the
    one with the rotation in its epilogue serves both. No other GEMM has an epilogue for it: where
    bf16 tensor cores multiply, the graph stays as it is.

    Exact: the epilogue rounds y to its dtype first, and does the same operations in their order.
    """
    matches = 0
    for back in list(q2_nodes(graph, MASKED_UNROTATE)):
        y, mask, transform = back.args
        if not isinstance(y, fx.Node) or not is_q2(y, GEMM) or len(y.users) > 1:
            continue
        of_gemm: dict[str, Any] = named_arguments(y)
        if of_gemm["bias"] is not None or choice_of(GEMM, y.args).name != TRITON_FP4:
            continue
        operands, (*schemes, dtype) = y.args[:6], y.args[7:]
        args: Any = (*operands, mask, *schemes, transform, dtype)
        if choice_of(GEMM_MASKED_UNROTATE, args).name != TRITON_FP4:
            continue
        with graph.inserting_before(back):
            both = graph.call_function(_OP, args)
        both.meta = {**y.meta, "val": back.meta["val"]}
        back.replace_all_uses_with(both)
        graph.erase_node(back)
        graph.erase_node(y)
        matches += 1
    return matches
