# SPDX-License-Identifier: Apache-2.0
"""Keys of node.meta that the pass fuse_rotations sets and the lowerings of the graph read."""

from __future__ import annotations

from torch import fx

# The quantizer may compute its operand (prologue fusion). The value is a list, to which the
# lowering appends what it was fused with, or why it was not.
MAY_FUSE = "q2_may_fuse"
# Another quantizer's operand is computed from half or more of the bytes that this one's is computed
# from: Inductor would fuse both producers into one kernel.
READS_THE_SAME = "q2_reads_the_same"
# The number of a pair of quantizers that may be one kernel. Nodes that compute the second one's
# operand are before the first one.
PAIR = "q2_pair"

_VIEWS_AND_CASTS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "squeeze") + (
    *("unsqueeze", "expand", "alias", "clone", "convert_element_type", "_to_copy"),
)


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether a node only changes the layout of a tensor, or casts it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _VIEWS_AND_CASTS
