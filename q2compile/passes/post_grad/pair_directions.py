"""Both quantisations of one gradient, along N for dgrad and along T for wgrad, from one read."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from q2compile.passes.graph_queries import q2_nodes
from q2compile.passes.verify import named_arguments


def pair_directions_pass(graph: fx.Graph) -> int:
    """Reading the gradient a second time is most of what quantising it costs.

    before                                         after
        a = rht_quantize(dy, s, S, R, False, 0)        c = rht_quantize_both(dy, s, t, S, R, 0)
        a0, a1, a2 = a[0], a[1], a[2]                  a0, a1, a2 = c[0], c[1], c[2]
        ...                                            b0, b1, b2 = c[3], c[4], c[5]
        b = rht_quantize(dy, t, S, R, True, 0)         ...
        b0, b1, b2 = b[0], b[1], b[2]

    Preconditions: one op of each direction on the same tensor, with the same scheme S, transform R
    and stream, and a seed each; both seeds stand before the first of the two ops (merge_seeds puts
    them there, so it runs before this pass).

    Exact: rht_quantize_both is defined as the two single ops, bit for bit.
    """
    waiting: dict[Any, fx.Node] = {}
    pairs = 0
    for node in list(q2_nodes(graph, "rht_quantize")):
        args = named_arguments(node)
        alike = (args["x"], args["scheme"], args["transform"], args["stream"])
        partner = waiting.pop((alike, not args["transpose"]), None)
        if partner is None:
            waiting[(alike, args["transpose"])] = node
        elif isinstance(args["seed"], fx.Node) and args["seed"] < partner:
            _replace(graph, first=partner, second=node)
            pairs += 1
    return pairs


def _replace(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Put one op in the place of the first; its outputs 0-2 are the row's, 3-5 the column's."""
    row, column = (second, first) if named_arguments(first)["transpose"] else (first, second)
    args: dict[str, Any] = named_arguments(row)
    column_seed: Any = named_arguments(column)["seed"]
    with graph.inserting_before(first):
        both = graph.call_function(
            torch.ops.q2.rht_quantize_both.default,
            (args["x"], args["seed"], column_seed)
            + (args["scheme"], args["transform"], args["stream"]),
        )
        both.meta = {**first.meta, "val": (*row.meta["val"], *column.meta["val"])}
        for node, offset in ((row, 0), (column, 3)):
            for getitem in list(node.users):
                index: Any = getitem.args[1]
                output = graph.call_function(operator.getitem, (both, offset + index))
                output.meta = dict(getitem.meta)
                getitem.replace_all_uses_with(output)
                graph.erase_node(getitem)
    graph.erase_node(row)
    graph.erase_node(column)
