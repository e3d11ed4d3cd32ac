# SPDX-License-Identifier: Apache-2.0
"""Quantize rows before they are gathered: each row once, however often it is named."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.graph.new_node import new_constant, new_node, new_size
from q2compile.graph.node_meta import NOTE
from q2compile.graph.nodes import depending_on_tangents, is_q2, outputs_of
from q2compile.graph.quantizers import is_forward_operand, quantizers
from q2compile.graph.storages import hint_of
from q2compile.passes.joint.gathered_rows import (
    GatheredRows,
    Zeroed,
    gathered,
)
from q2compile.runtime_kernels.ops.table import AMAX, MASK, QuantizerCall

_aten = torch.ops.aten
_OFTEN = 2  # rows that are gathered, for one that there is, from which on it pays


def quantize_rows_once_pass(graph: fx.Graph) -> int:
    """Quantizing a row needs nothing of the others, but for the global scale: so of a token that
    goes to eight experts the codes are made once, and these are gathered.

    before                                  after
        x = index(h, [rows])                    q = quantize(h, scheme=S, rowwise)
        q = quantize(x, scheme=S, rowwise)      g = gather_rows(q[0], q[1], rows)
        y = grouped_gemm(*q, ...)               y = grouped_gemm(*g, q[2], ...)
        r = requantize(*q, offs=...)            r = requantize(*g, q[2], offs=...)

    The forward saves q, an eighth of what it was; g is tagged so that the backward makes its own
    (an index that it needs anyway, for the gradient of h).

    The global scale is of the rows that are gathered alone. Where the index is not known to name
    all (`names_all`), the others are zero for the quantizer, and so are rows that are zeroed after
    the gather; those are read from a row of zeros behind the last:

        x = index(h, [rows])                    z = where(m, M, rows)
        x = where(m[:, None], 0, x)             p = index_put(full([M + 1], False), [z], True)
        q = quantize(x, scheme=S, rowwise)      q = quantize(where(p[:, None], pad(h), 0), ...)
                                                g = gather_rows(q[0], q[1], z)

    Preconditions: index, index_select or gather along rows, through views that leave rows whole and
    casts, which move with the quantizer; blocks of one row; no random bits, which depend on the
    place; rows are gathered `_OFTEN` times as often as there are any. Who else reads x still does:
    the quantizer is cheaper all the same.

    Exact: a quantizer of blocks within rows is a function of each row and of the largest of all,
    and that is the same. A row of zeros has the codes of a row of zeros.
    """
    backward = depending_on_tangents(graph)
    matches = 0
    for node, call in list(quantizers(graph)):
        found = gathered(call.x) if _within_rows(call) else None
        if found is None or not any(output.users for output in node.users):
            continue
        rows = hint_of(found.index.meta["val"].numel())
        there = hint_of(found.source.meta["val"].shape[0])
        if rows is None or there is None:
            node.meta[NOTE] = f"{node.name} is left: its number of rows is not known"
        elif rows < _OFTEN * there:
            node.meta[NOTE] = f"{node.name} is left: {rows} rows, gathered from {there}"
        else:
            note = f"{there} rows are quantized for the {rows} that are gathered from them"
            _Rewritten(graph, node, call, found).gather(node in backward, note)
            matches += 1
    return matches


def _within_rows(call: QuantizerCall) -> bool:
    """Whether a quantizer's codes of a row depend on nothing but that row and the global scale."""
    return is_forward_operand(call) and not call.scheme.form and call.scheme.block[0] == 1


class _Rewritten:
    """One quantizer of gathered rows, as it is made anew."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, call: QuantizerCall, found: GatheredRows
    ) -> None:
        self.graph, self.node, self.call, self.found = graph, node, call, found

    def gather(self, in_backward: bool, note: str) -> None:
        """Replace the quantizer by one of the source, and gather its codes before each reader."""
        node, graph = self.node, self.graph
        outputs = outputs_of(node)
        with graph.inserting_before(node):
            source, rows = self._source()
            call, amax = self.call, self.call.args["amax"]
            if amax is not None and is_q2(amax, AMAX) and amax.args[0] is call.x:
                amax = self._call(amax.target, source)  # rows of zeros do not change it
            args, kwargs = call.replace(x=source, amax=amax).written()
            made = self._call(node.target, *args, **kwargs)
            made.meta[NOTE] = f"{made.name}: {note}"
            parts = {i: self._call(operator.getitem, made, i) for i in {0, 1, *outputs}}
        readers = [reader for output in outputs.values() for reader in output.users]
        with graph.inserting_before(min(readers)):
            op = self._call(torch.ops.q2.gather_rows.default, parts[0], parts[1], rows)
            recomputed = [op]
            for i in (0, 1):
                parts[i] = self._call(operator.getitem, op, i)
                recomputed.append(parts[i])
            if MASK in parts:
                parts[MASK] = self._call(_aten.index.Tensor, parts[MASK], [rows])
                recomputed.append(parts[MASK])
        for one in recomputed if not in_backward else ():
            one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        for i, output in outputs.items():
            output.replace_all_uses_with(parts[i])
        _erase_unread(graph, [*outputs.values()])

    def _source(self) -> tuple[fx.Node, fx.Node]:
        """The matrix that is quantized, and the rows that are gathered from its codes."""
        found = self.found
        source, rows = found.source, self._flat(found.index)
        for cast in reversed(found.casts):
            source = self._call(cast.target, source, *cast.args[1:], **cast.kwargs)
        if not found.zeroed and found.names_all:
            return source, rows
        if found.zeroed:
            count = self._size(source)
            wrapped = self._call(_aten.add.Tensor, rows, count)
            is_negative = self._call(_aten.lt.Scalar, rows, 0)
            rows = self._call(_aten.where.self, is_negative, wrapped, rows)
            behind = self._full([], count, rows)
            rows = self._call(_aten.where.self, self._zeroed(found.zeroed), behind, rows)
            source = self._call(_aten.constant_pad_nd.default, source, [0, 0, 0, 1])
        none = self._full([self._size(source)], False, rows, torch.bool)
        named = self._call(
            _aten.index_put.default, none, [rows], self._full([], True, rows, torch.bool)
        )
        named = self._call(_aten.unsqueeze.default, named, 1)
        zero = self._full([], 0, source)
        return self._call(_aten.where.self, named, source, zero), rows

    def _zeroed(self, masks: list[Zeroed]) -> fx.Node:
        """Which of the gathered rows are zero."""
        flat = []
        for mask, where_set in masks:
            one = self._flat(mask)
            flat.append(one if where_set else self._call(_aten.logical_not.default, one))
        either = flat[0]
        for other in flat[1:]:
            either = self._call(_aten.logical_or.default, either, other)
        return either

    def _flat(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].dim() == 1:
            return node
        return self._call(_aten.reshape.default, node, [-1])

    def _size(self, node: fx.Node) -> Any:
        return new_size(self.node, node)

    def _full(
        self, size: list[Any], value: Any, like: fx.Node, dtype: torch.dtype | None = None
    ) -> fx.Node:
        return new_constant(self.node, size, value, like, dtype)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_node(self.node, target, *args, **kwargs)


def _erase_unread(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase nodes that nobody reads any more, and what only they have read."""
    pending = set(nodes)
    while pending:
        node = max(pending)
        pending.remove(node)
        if not node.users and node.op == "call_function" and not node.is_impure():
            pending.update(node.all_input_nodes)
            graph.erase_node(node)
