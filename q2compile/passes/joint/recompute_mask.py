# SPDX-License-Identifier: Apache-2.0
"""Masked rows of a GEMM's result: save the result, recompute the mask."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.graph.nodes import GEMM_OPS, depending_on_tangents, is_q2
from q2compile.graph.views import behind
from q2compile.passes.joint.gathered_rows import zeroes_rows


def recompute_mask_pass(graph: fx.Graph) -> int:
    """Rows of a grouped GEMM that belong to no expert of this rank are set to zero (Hugging Face's
    expert parallelism). The masked result is as large as the unmasked one, so the partitioner may
    save either. A saved tensor must be written, and the unmasked result is in memory anyway.

    before, as the partitioner sees it        after
        y = grouped_gemm(...)                     y = grouped_gemm(...)   # save
        z = where(m, 0, y)      # save            z = where(m, 0, y)      # recompute
        out = f(z)                                out = f(z)
        dw = g(dy, z)                             dw = g(dy, z)

    z is then computed where it is read, in both graphs, and never written.

    Preconditions: the joint graph; the mask has one element per row, so that saving it costs
    little; no activation checkpoint covers it. Exact."""
    backward = depending_on_tangents(graph)
    matches = 0
    for node in graph.nodes:
        decided = node in backward or "recompute" in node.meta
        found = None if decided or not node.args else zeroes_rows(node)
        if found is not None and is_q2(behind(found[1]), *GEMM_OPS):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            matches += 1
    return matches
