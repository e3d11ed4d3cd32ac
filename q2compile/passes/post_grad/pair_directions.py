"""Both quantisations of one gradient, along N for dgrad and along T for wgrad, from one read."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from q2compile.passes.graph_queries import is_q2, q2_nodes
from q2compile.passes.verify import named_arguments


def pair_directions_pass(graph: fx.Graph) -> int:
    """Reading the gradient a second time is most of what quantising it costs.

    before                                         after
        a = rht_quantize(dy, s, S, R, False, 0)        c = rht_quantize_both(dy, s, t, S, R, 0)
        a0, a1, a2 = a[0], a[1], a[2]                  a0, a1, a2 = c[0], c[1], c[2]
        ...                                            b0, b1, b2 = c[3], c[4], c[5]
        b = rht_quantize(dy, t, S, R, True, 0)         ...
        b0, b1, b2 = b[0], b[1], b[2]

    Likewise rht_quantize_groups(dy, offs, padded_offs, t, S, R, 0), of experts, for the second, and
    rht_quantize_groups_both for the result.

    Preconditions: one op of each direction on the same tensor, with the same scheme S, transform R
    and stream, and a seed each; both seeds, and the ends of the groups, stand before the first of
    the two ops (merge_seeds puts seeds there, so it runs before this pass; padded_ends is put there
    by this one).

    Exact: rht_quantize_both is defined as the two single ops, bit for bit, and its sister too.
    """
    waiting: dict[Any, fx.Node] = {}
    pairs = 0
    for node in list(q2_nodes(graph, "rht_quantize", "rht_quantize_groups")):
        args = named_arguments(node)
        alike = (args["x"], args["scheme"], args["transform"], args["stream"])
        columns = _along_columns(node)
        partner = waiting.pop((alike, not columns), None)
        if partner is None:
            waiting[(alike, columns)] = node
        elif isinstance(args["seed"], fx.Node) and all(
            _stands_before(partner, needed) for needed in (args["seed"], *_groups(node))
        ):
            _replace(graph, first=partner, second=node)
            pairs += 1
    return pairs


def _along_columns(node: fx.Node) -> bool:
    return is_q2(node, "rht_quantize_groups") or bool(named_arguments(node)["transpose"])


def _groups(node: fx.Node) -> tuple[Any, ...]:
    """Their ends, of an op that has some."""
    args = named_arguments(node)
    return tuple(args[name] for name in ("offs", "padded_offs") if name in args)


def _stands_before(first: fx.Node, needed: fx.Node) -> bool:
    """Whether ``needed`` does, where it can be moved there after that."""
    if is_q2(needed, "padded_ends") and first < needed:
        offs: Any = needed.args[0]
        if offs < first:
            first.prepend(needed)
    return needed < first


def _replace(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Put one op in the place of the first; its outputs 0-2 are the row's, 3-5 the column's."""
    row, column = (second, first) if _along_columns(first) else (first, second)
    args: dict[str, Any] = named_arguments(row)
    column_seed: Any = named_arguments(column)["seed"]
    groups = _groups(column)
    op = torch.ops.q2.rht_quantize_groups_both if groups else torch.ops.q2.rht_quantize_both
    with graph.inserting_before(first):
        both = graph.call_function(
            op.default,
            (args["x"], *groups, args["seed"], column_seed)
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
