"""Rotating quantisers that may compute their operand in the place of reading it."""

from __future__ import annotations

from torch import fx

from q2compile.passes.graph_queries import BOTH_SUMMED, ONE_SUMMED, q2_nodes
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE

_OPS = ("rht_quantize", "rht_quantize_both", "quantize_masked", *ONE_SUMMED, *BOTH_SUMMED)


def fuse_rotations_pass(graph: fx.Graph) -> int:
    """Marks every rht_quantize, rht_quantize_both and quantize_masked of the graph, and those that
    sum columns, too; with the option `fuse_rotations` alone. Whether each is fused with what makes
    its operand is decided when Inductor lowers it, which knows what is still an expression
    (lowering/fused_launches.py), and noted in the one list that all marks hold.

    Precondition: it is the last pass, since the others replace such nodes.

    Exact: nothing changes in the graph.
    """
    notes: list[str] = []
    found = list(q2_nodes(graph, *_OPS))
    for node in found:
        node.meta[MAY_FUSE] = notes
    return len(found)


def fusion_notes(graph: fx.Graph) -> list[str]:
    """The list that lowerings add to; empty where the pass has not run."""
    return next((node.meta[MAY_FUSE] for node in graph.nodes if MAY_FUSE in node.meta), [])
