# SPDX-License-Identifier: Apache-2.0
"""Keys of q2compile in node.meta."""

# Keys in node.meta["custom"], which torch carries through AOTAutograd into both graphs.
SITE, SEED_INDEX = "q2_site", "q2_salt"

# A key in node.meta: what was raised when q2compile prepared the node.
FAILURE = "q2_failure"

# A key in node.meta of an all-gather: seed_index of a matmul -> "gathers codes" or
# "gathers values: why".
GATHERS = "q2_gathers"
