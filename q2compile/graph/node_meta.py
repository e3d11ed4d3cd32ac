# SPDX-License-Identifier: Apache-2.0
"""Keys of q2compile in node.meta."""

from __future__ import annotations

from torch import fx

# Keys in node.meta["custom"], which torch carries through AOTAutograd into both graphs.
SITE, SEED_INDEX = "q2_site", "q2_salt"

# The error that was raised when q2compile prepared the node.
FAILURE = "q2_failure"

# An all-gather's key: seed_index of a matmul -> "gathers codes" or "gathers values: why".
GATHERS = "q2_gathers"

# A sentence about a node for the record of the pass that wrote it.
NOTE = "q2_note"

# Set by the pass fuse_rotations, read by the lowerings of the graph:
# The quantizer may compute its operand (prologue fusion). The value is a list, to which the
# lowering appends what it was fused with, or why it was not.
MAY_FUSE = "q2_may_fuse"
# Another quantizer's operand is computed from half or more of the bytes that this one's is computed
# from: Inductor would fuse both producers into one kernel.
READS_THE_SAME = "q2_reads_the_same"
# The number of a pair of quantizers that may be one kernel. Nodes that compute the second one's
# operand are before the first one.
PAIR = "q2_pair"

# Set by the pass group_launches, read by the lowerings of the graph:
# A quantizer's key: the number of its launch group in this graph. Quantizers of one group share a
# tail launch (runtime_kernels/cuda/quantize/grouped_launch.py).
LAUNCH_GROUP = "q2_launch_group"
# A GEMM's key: the group whose tail launch computes alpha, the product of its global scales.
ALPHA_FROM = "q2_alpha_from"


def site_of(node: fx.Node) -> str | None:
    """The name of the matmul that a node is a part of; None if it is not known."""
    return node.meta.get("custom", {}).get(SITE)


def seed_index_of(node: fx.Node) -> int | None:
    """The seed index of the matmul that a node is a part of; None if it is not known."""
    return node.meta.get("custom", {}).get(SEED_INDEX)


def pop_notes(graph: fx.Graph) -> list[str]:
    """The notes that a pass has left in a graph. Each is returned once."""
    return [node.meta.pop(NOTE) for node in graph.nodes if NOTE in node.meta]
