"""The codes of some weights: saved after all, in graphs that are already cut."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from q2compile.torch_internals.partitioner import save_instead


def keep_weights(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str], results: int
) -> None:
    """Has the backward take the codes of some weights from the forward.

    before    forward                       backward
                  q = quantize(w, ...)          w = placeholder
                  y = gemm(qx, q)               q = quantize(w, ...)
                  return y, qx, w               r = requantize(q, s)

    after         q = quantize(w, ...)          q = placeholder
                  y = gemm(qx, q)               r = requantize(q, s)
                  return y, q, qx

    names    of the nodes that quantise the weights, alike in both graphs
    results  how many outputs of the forward are the model's; the rest is saved

    To unmark them in the joint graph, and to cut that a second time, comes to the same: two cuts
    were 5.8 s of 32 layers of a Llama, one is 2.6 (torch 2.11, a CPU core, 2026-11-23).

    Precondition: the graphs are cut, with the marks of `recompute_weights_pass`, and not lowered.

    Exact: what is saved is what the backward would make.
    """
    again = {node.name: node for node in backward.nodes if node.name in names}
    pairs = []
    for weight in [node for node in forward.nodes if node.name in again]:
        made = {node.args[1]: node for node in weight.users}
        for taken in again[weight.name].users:
            index: Any = taken.args[1]
            pairs.append((made.get(index) or _output(forward, weight, index, taken), taken))
    save_instead(forward, backward, results, pairs)


def _output(graph: fx.Graph, op: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """An output that the forward itself does not read, as QuEST's mask of w."""
    with graph.inserting_after(op):
        output = graph.call_function(operator.getitem, (op, index))
    output.meta.update(like.meta)
    return output
