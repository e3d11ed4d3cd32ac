# SPDX-License-Identifier: Apache-2.0
"""Seeds from a counter of q2compile's own, under the option ``seed``."""

from __future__ import annotations

import torch
from torch import fx


def own_seeds_pass(graph: fx.Graph, key: int) -> int:
    """Draw every seed of a graph from the counter of ``key``, so that training does not advance
    torch's default generator.

    before                              after
        s = q2.seed(dy, 3)                  s = q2.seed(dy, 3, key)

    Precondition: the joint graph. The seeds are other 64 random bits than before."""
    seeds = graph.find_nodes(op="call_function", target=torch.ops.q2.seed.default)
    for node in seeds:
        node.args = (*node.args[:2], key)
    return len(seeds)
