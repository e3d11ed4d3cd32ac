# SPDX-License-Identifier: Apache-2.0
"""Copies of graphs from notes that were taken before the graphs changed."""

from __future__ import annotations

import torch
from torch import fx

from q2compile.torch_internals.dynamo import noted


def test_a_noted_graph_is_made_as_it_was() -> None:
    def function(x, y):
        a, b = torch.split(x + y, 2)
        return {"sum": torch.cat([a, b], dim=0), "part": x[1:, None]}

    graph = fx.symbolic_trace(function).graph
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    text = str(graph)
    made = noted(graph)
    cat = graph.find_nodes(op="call_function", target=torch.cat)[0]
    cat.kwargs = {"dim": 1}
    cat.meta["number"] = -1
    cat.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
    graph.erase_node(cat)
    again = made()
    again.lint()
    assert str(again) == text != str(graph)
    assert [node.meta["number"] for node in again.nodes] == list(range(len(again.nodes)))
    x, y = torch.arange(4.0).unflatten(0, (4, 1)), torch.ones(4, 1)
    results = fx.GraphModule({}, again)(x, y)
    assert torch.equal(results["sum"], x + y) and torch.equal(results["part"], x[1:, None])
