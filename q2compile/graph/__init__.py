# SPDX-License-Identifier: Apache-2.0
"""The vocabulary for FX graphs, which capture, passes, lowerings, telemetry and reports share. May
import runtime_kernels and torch_internals.

views.py          the table of views and casts
nodes.py          calls of q2 ops: what they are, their arguments and outputs
quantizers.py     nodes that quantize, as calls of the table of ops
served.py         which kernel would run a node
new_node.py       nodes that a pass inserts
node_meta.py      keys in node.meta
launch_groups.py  quantizers that are adjacent, and what they share
storages.py       the memory behind the values of a graph
"""
