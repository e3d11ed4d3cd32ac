# SPDX-License-Identifier: Apache-2.0
"""Move concatenations right before the rotating quantizer that reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.views import RESHAPE, readers

_aten = torch.ops.aten


def concatenate_last_pass(graph: fx.Graph) -> int:
    """A row mask of a concatenation is moved to its parts, the gradients of gate and up in a
    mixture of experts:

    before                                 after
        c = cat([dg, du], 1)                   a = where(m, 0, dg)
        dy = where(m, 0, c)  # m: [T, 1]       b = where(m, 0, du)
        q = quantize(dy, offs=...)             dy = cat([a, b], 1)
                                               q = quantize(dy, offs=...)

    The lowering of such a `cat` writes both parts by one kernel
    (lowering/prologue/concatenated.py). A `where` behind it would read and write the result once
    more.

    Preconditions: nothing else reads c, and dy is read, through views, by rotating quantizers
    alone; neither the mask nor the other value differs along the dimension of the concatenation.

    Exact: the same elements are chosen."""
    matches = 0
    for masked in graph.find_nodes(op="call_function", target=_aten.where.self):
        for at in (1, 2):
            cat = masked.args[at]
            if _is_concatenation(cat) and _may_go_before(masked, at) and _is_quantized(masked):
                _move_before(masked, at)
                matches += 1
                break
    return matches


def _is_concatenation(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _aten.cat.default and len(node.users) == 1


def _is_quantized(node: fx.Node) -> bool:
    """Whether only rotating quantizers read a node."""
    found = list(readers(node, RESHAPE))
    return bool(found) and all(map(_rotates, found))


def _rotates(node: fx.Node) -> bool:
    call = quantizer_of(node)
    return call is not None and not call.masked and (call.rotated or call.columnwise)


def _may_go_before(masked: fx.Node, at: int) -> bool:
    """Whether the mask and the other value of a `where` are the same for all parts."""
    cat: Any = masked.args[at]
    value, parts = cat.meta["val"], [part.meta["val"] for part in cat.args[0]]
    rank, dim = value.dim(), _dim(cat)
    if masked.meta["val"].shape != value.shape or masked.meta["val"].dtype != value.dtype:
        return False
    if any(part.dim() != rank or part.dtype != value.dtype for part in parts):
        return False
    others = (arg.meta["val"] for arg in masked.all_input_nodes if arg is not cat)
    return all(o.dim() < rank - dim or o.shape[dim - rank] == 1 for o in others)


def _dim(cat: fx.Node) -> int:
    dim: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return dim % cat.meta["val"].dim()


def _move_before(masked: fx.Node, at: int) -> None:
    graph, cat = masked.graph, masked.args[at]
    assert isinstance(cat, fx.Node)
    parts: Any = cat.args[0]
    with graph.inserting_before(masked):
        chosen = []
        for part in parts:
            args = [part if i == at else arg for i, arg in enumerate(masked.args)]
            node = graph.call_function(_aten.where.self, tuple(args))
            node.meta = {**masked.meta, "val": part.meta["val"]}
            chosen.append(node)
        last = graph.call_function(_aten.cat.default, (chosen, _dim(cat)))
    last.meta = {**cat.meta, "val": masked.meta["val"]}
    masked.replace_all_uses_with(last)
    graph.erase_node(masked)
    graph.erase_node(cat)
