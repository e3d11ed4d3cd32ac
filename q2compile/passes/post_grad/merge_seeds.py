# SPDX-License-Identifier: Apache-2.0
"""All seeds of a backward graph become one draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from q2compile.graph.new_node import new_node
from q2compile.graph.nodes import device_of
from q2compile.runtime_kernels.numerics.seeds import iota, seeds_of


def merge_seeds_pass(graph: fx.Graph) -> int:
    """One draw for all the seeds of a graph, per device, and per key under the option ``seed``.

    before                              after
        s = q2.seed(dy, 0)                  seeds = aten.randint.low(-2**63, 2**63 - 1, [2])
        ...                                 s = aten.select(seeds, 0, 0)
        t = q2.seed(dx, 1)                  t = aten.select(seeds, 0, 1)
                                            ...

    With a key: before                  after
        s = q2.seed(dy, 0, key)             drawn = q2.draw(dy, key, 2)
        ...                                 seeds = numerics.seeds(drawn, 2, key), in aten ops
        t = q2.seed(dx, 1, key)             ...

    Precondition: the partitioner has run. The draw no longer hangs on a gradient, so before that it
    would be moved into the forward graph, and drawn a second time in the backward.

    Exact: each seed is 64 bits of the same generator. On CPU the draw gives the very values, in
    graph order, that the single draws would have given, so results equal those without the pass bit
    for bit; with a key on every device.
    """
    found = graph.find_nodes(op="call_function", target=torch.ops.q2.seed.default)
    by_source: dict[tuple[torch.device, int | None], list[fx.Node]] = {}
    for node in found:
        key = node.args[2] if len(node.args) > 2 else None
        by_source.setdefault((device_of(node), key), []).append(node)
    for (device, key), nodes in by_source.items():
        first = min(nodes)
        with graph.inserting_before(first):
            if key is None:
                drawn = _drawn_by_torch(first, len(nodes), device)
            else:
                drawn = _drawn_by_key(first, len(nodes), key)
            # Fakes of all views by one call: a call for each took longer than all the rest here.
            views = drawn.meta["val"].unbind(0)
            for i, (node, view) in enumerate(zip(sorted(nodes), views, strict=True)):
                one = graph.call_function(torch.ops.aten.select.int, (drawn, 0, i))
                one.meta = {**node.meta, "val": view}
                node.replace_all_uses_with(one)
        for node in nodes:
            graph.erase_node(node)
    return len(found)


def _drawn_by_torch(first: fx.Node, count: int, device: torch.device) -> fx.Node:
    """int64 [count] from the default generator."""
    draw = first.graph.call_function(
        torch.ops.aten.randint.low,
        (-(2**63), 2**63 - 1, [count]),
        {"dtype": torch.int64, "device": device},
    )
    draw.meta = _meta_of(first) | {"val": first.meta["val"].new_empty(count)}
    return draw


class _Int64:
    """An int64 tensor in the making: an operation with a number adds a node to the graph.

    `make_fx` would trace the function instead. But it marks the whole process as tracing, and
    torch.compile refuses to run in any thread then, unless Dynamo is compiling. A backward is
    compiled when it is first run, after Dynamo has ended.
    """

    def __init__(self, like: fx.Node, node: fx.Node) -> None:
        self.like, self.node = like, node

    def _new(self, target: Any, other: _Int64 | int) -> _Int64:
        right = other.node if isinstance(other, _Int64) else other
        return _Int64(self.like, new_node(self.like, target, self.node, right))

    def __add__(self, other: _Int64 | int) -> _Int64:
        return self._new(torch.ops.aten.add.Tensor, other)

    def __mul__(self, other: int) -> _Int64:
        return self._new(torch.ops.aten.mul.Tensor, other)

    def __xor__(self, other: _Int64) -> _Int64:
        return self._new(torch.ops.aten.bitwise_xor.Tensor, other)

    def __rshift__(self, by: int) -> _Int64:
        return self._new(torch.ops.aten.__rshift__.Scalar, by)

    def __and__(self, mask: int) -> _Int64:
        return self._new(torch.ops.aten.bitwise_and.Scalar, mask)


def _drawn_by_key(first: fx.Node, count: int, key: int) -> fx.Node:
    """int64 [count] from the counter of a key. Inductor makes one kernel of the ops behind the
    draw."""
    drawn = new_node(first, torch.ops.q2.draw.default, first.args[0], key, count)
    numbers = new_node(first, torch.ops.prims.iota.default, count, **iota(drawn.meta["val"].device))
    return seeds_of(_Int64(first, drawn) + _Int64(first, numbers), key).node


def _meta_of(node: fx.Node) -> dict[str, object]:
    return {"custom": node.meta.get("custom", {})}
