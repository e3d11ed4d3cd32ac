# SPDX-License-Identifier: Apache-2.0
"""Seeds of constant gradients, which are then drawn in the backward like all others."""

from __future__ import annotations

import torch
from torch import fx

from q2compile.graph.nodes import device_of, tangents


def anchor_seeds_pass(graph: fx.Graph) -> int:
    """A product with 0, as in ``loss + 0 * unused.sum()``, makes Inductor fold a gradient into a
    constant. A seed drawn for it then depends on no gradient, and the partitioner puts it into the
    forward, or into both graphs.

    before                              after
        dy = aten.full([T, N], 0)           dy = aten.full([T, N], 0)
        s = q2.seed(dy, 3)                  s = q2.seed(tangents_1, 3)

    Precondition: the joint graph, after Inductor has folded constants.

    Exact: the anchor decides where a seed is drawn and on which device, not its value."""
    incoming, matches = tangents(graph), 0
    for seed in graph.find_nodes(op="call_function", target=torch.ops.q2.seed.default):
        device = device_of(seed)
        anchors = (t for t in incoming if isinstance(t.meta.get("val"), torch.Tensor))
        anchor = next((t for t in anchors if t.meta["val"].device == device), None)
        if anchor is not None and _is_constant(seed.args[0]):
            seed.update_arg(0, anchor)
            matches += 1
    return matches


def _is_constant(node: object) -> bool:
    """Whether no input of the graph has a part in it."""
    todo, seen = [node], {node}
    while todo:
        one = todo.pop()
        assert isinstance(one, fx.Node)
        if one.op in ("placeholder", "get_attr"):
            return False
        todo += [n for n in one.all_input_nodes if n not in seen]
        seen.update(one.all_input_nodes)
    return True
