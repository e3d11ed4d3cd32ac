"""Codes that dgrad re-uses transposed: turned in the backward, where they may not have to be."""

from __future__ import annotations

import operator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.passes.graph_queries import depending_on_tangents, q2_nodes


def turn_in_backward_pass(graph: fx.Graph) -> int:
    """A transposition needs nothing of the gradient, so the partitioner has it done in the forward
    and saves what comes out.

    before, as the partitioner sees it            after
        q = quantize(w, ...)    # in the forward      q = quantize(w, ...)    # save
        t = transpose(q, ...)   # save                t = transpose(q, ...)   # recompute
        dx = gemm(qdy, t)                             dx = gemm(qdy, t)

    The same number of bytes is saved and the same work is done, but the graph that multiplies by
    the turned codes now sees what they were turned from: a GEMM of bf16 numbers reads those by
    columns, and nothing is turned (lowering/emulated_gemm.py).

    Precondition: the joint graph. Exact.
    """
    backward = depending_on_tangents(graph)
    marked = 0
    for node in q2_nodes(graph, "transpose"):
        if node not in backward:
            for turned in (node, *(n for n in node.users if n.target is operator.getitem)):
                turned.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked += 1
    return marked
