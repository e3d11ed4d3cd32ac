# SPDX-License-Identifier: Apache-2.0
"""All seeds of a backward graph become one draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from q2compile.graph.new_node import write
from q2compile.graph.nodes import device_of
from q2compile.runtime_kernels.numerics.seeds import seeds


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


def _drawn_by_key(first: fx.Node, count: int, key: int) -> fx.Node:
    """int64 [count] from the counter of a key. Inductor makes one kernel of the ops behind the
    draw."""

    def drawn(anchor: torch.Tensor) -> torch.Tensor:
        return seeds(torch.ops.q2.draw(anchor, key, count), count, key)

    anchor: Any = first.args[0]
    node: fx.Node = write(first, drawn, anchor)[0]
    return node


def _meta_of(node: fx.Node) -> dict[str, object]:
    return {"custom": node.meta.get("custom", {})}
