"""All seeds of a backward graph become one draw."""

from __future__ import annotations

import torch
from torch import fx

from q2compile.passes.graph_queries import device_of


def merge_seeds_pass(graph: fx.Graph) -> int:
    """One draw from the default generator for all the seeds of a graph, per device.

    before                              after
        s = q2.seed(dy, 0)                  seeds = aten.randint.low(-2**63, 2**63 - 1, [2])
        ...                                 s = aten.select(seeds, 0, 0)
        t = q2.seed(dx, 1)                  t = aten.select(seeds, 0, 1)
                                            ...

    Precondition: the partitioner has run. The draw no longer hangs on a gradient, so before that it
    would be moved into the forward graph, and drawn a second time in the backward.

    Exact: each seed is 64 bits of the same generator. On CPU the draw gives the very values, in
    graph order, that the single draws would have given, so results equal those without the pass bit
    for bit.
    """
    seeds = graph.find_nodes(op="call_function", target=torch.ops.q2.seed.default)
    by_device: dict[torch.device, list[fx.Node]] = {}
    for node in seeds:
        by_device.setdefault(device_of(node), []).append(node)
    for device, nodes in by_device.items():
        first = min(nodes)
        with graph.inserting_before(first):
            draw = graph.call_function(
                torch.ops.aten.randint.low,
                (-(2**63), 2**63 - 1, [len(nodes)]),
                {"dtype": torch.int64, "device": device},
            )
            fake = first.meta["val"].new_empty(len(nodes))
            draw.meta = {"val": fake, "custom": first.meta.get("custom", {})}
            # Fakes of all views by one call: a call for each took longer than all the rest here.
            for i, (node, view) in enumerate(zip(sorted(nodes), fake.unbind(0), strict=True)):
                one = graph.call_function(torch.ops.aten.select.int, (draw, 0, i))
                one.meta = {**node.meta, "val": view}
                node.replace_all_uses_with(one)
        for node in nodes:
            graph.erase_node(node)
    return len(seeds)
