# SPDX-License-Identifier: Apache-2.0
"""What the pass fuse_rotations and the lowerings of one graph both know."""

from __future__ import annotations

from torch import fx

# Keys of a quantizer's node.meta.
# It may compute its operand. A list, to which the lowering adds what it was fused with, or why not.
MAY_FUSE = "q2_may_fuse"
# Another one's operand is made from half or more of what this one's is, by bytes: Inductor would
# make one kernel of both producers.
READS_THE_SAME = "q2_reads_the_same"
# Two may be one kernel: the number of the pair. What the second one's operand is computed by stands
# before the first one.
PAIR = "q2_pair"

_VIEWS_AND_CASTS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "squeeze") + (
    *("unsqueeze", "expand", "alias", "clone", "convert_element_type", "_to_copy"),
)


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether a node only says how numbers lie or are rounded."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _VIEWS_AND_CASTS
