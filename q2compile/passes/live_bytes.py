# SPDX-License-Identifier: Apache-2.0
"""How many bytes a graph holds, moment by moment: a model of its memory before it is lowered.

A moment is the running of one node. Alive are the storages that exist by then and will still be
read, and the graph's results. Inductor does not write an element-wise operation that only other
element-wise operations read: it is computed where it is read, and its inputs live until then. This
model does the same.

Why not torch's own estimators: torch._inductor.memory sees kernels as they are fused, but only
when a graph is lowered, too late to decide what the forward saves. The one over FX graphs
(torch._inductor.fx_passes.memory_estimator) counts each element-wise operation as written.
tests/q2compile/passes/test_live_bytes.py compares this model with the first.

Left out: what a kernel needs while it runs, and that Inductor may run nodes in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from q2compile.torch_internals.partitioner import fuses

_aten = torch.ops.aten
# Inductor has these write into their first argument, where nobody else reads it.
_INTO_FIRST = frozenset(
    [_aten.index_put.default, _aten._unsafe_index_put.default, _aten.scatter_add.default]
    + [_aten._unsafe_masked_index_put_accumulate.default]
)
Storage = int  # the address of a fake storage: who shares it is a view


SMALL = 64 * 2**20  # bytes that no GPU is short of


def worth_time(peak: int) -> float:
    """Bytes of the peak of a step for which a kernel may run a second time: a fiftieth of it, and
    no less than `SMALL`.

    A fiftieth is where memory and time change hands one for one: in four layers of width 2048
    quantizing the weights a second time took 2% of the time and gave back 2% of the peak
    (`examples/benchmarks/README.md`).
    """
    return max(0.02 * peak, SMALL)


class LiveBytes:
    """
    alive     bytes at each node of the graph, in order
    place     a node's name -> where it stands
    last_read  storage -> where it is read last
    """

    def __init__(self, graph: fx.Graph, resident: Set[Storage] = frozenset()) -> None:
        """resident: storages that somebody else holds all the time, which are not counted."""
        self._resident = resident
        self._reads: dict[Storage, frozenset[Storage]] = {}  # of what is computed where it is read
        self._made: dict[Storage, int] = {}
        self._bytes: dict[Storage, int] = {}
        self.last_read: dict[Storage, int] = {}
        self.place: dict[str, int] = {}
        inlined = _inlined(graph)
        for i, node in enumerate(graph.nodes):
            self.place[node.name] = i
            self._add(i, node, node in inlined)
        self.alive = [0] * (len(self.place) + 1)
        for storage, size in self._bytes.items():
            made = self._made[storage]
            self.alive[made] += size
            self.alive[max(made, self.last_read.get(storage, made)) + 1] -= size
        for i in range(1, len(self.alive)):
            self.alive[i] += self.alive[i - 1]
        self.alive.pop()

    def _add(self, i: int, node: fx.Node, inlined: bool) -> None:
        reads = frozenset(s for n in node.all_input_nodes for s in self._written(storages(n)))
        sizes = storages(node)
        new = [s for s in sizes if s not in self._made and s not in self._reads]
        if new and inlined:
            self._reads.update(dict.fromkeys(new, reads))
            return
        for storage in reads:
            self.last_read[storage] = i
        if node.target in _INTO_FIRST and len(node.all_input_nodes[0].users) == 1:
            written = frozenset(self._written(storages(node.all_input_nodes[0])))
            self._reads.update(dict.fromkeys(new, written))
            return
        for storage in new:
            if storage not in self._resident:
                self._made[storage], self._bytes[storage] = i, sizes[storage]

    def _written(self, found: Iterable[Storage]) -> Iterable[Storage]:
        for storage in found:
            if storage in self._reads:
                yield from self._reads[storage]
            elif storage not in self._resident:
                yield storage


def held_outside(graph: fx.Graph) -> dict[Storage, int]:
    """The inputs of a graph of AOTAutograd that its caller holds for as long as it runs: all of a
    forward; of a backward the parameters, and the incoming gradients, which autograd holds.
    """
    nodes = graph.find_nodes(op="placeholder")
    if any(node.name.startswith("tangents") for node in nodes):
        nodes = [node for node in nodes if node.name.startswith(("primals", "tangents"))]
    return {s: size for node in nodes for s, size in storages(node).items()}


def storages(node: fx.Node, output: int | None = None) -> dict[Storage, int]:
    """The storages of what ``node`` makes or passes on, or of one of its outputs, and their
    bytes."""
    found = {}
    values: Any = node.meta.get("val")
    for value in tree_leaves(values if output is None else values[output]):
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            memory = value.untyped_storage()
            found[memory._cdata] = _concrete(memory.nbytes())
    return found


def _inlined(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that only element-wise operations read, directly or through a view that is inlined
    itself. Not reductions (their result is smaller): those are written."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not fuses(node):
            continue
        sizes = storages(node)
        inputs = [sum(storages(n).values()) for n in node.all_input_nodes]
        if 4 * sum(sizes.values()) >= max(inputs, default=0) and all(
            fuses(user) and (user in found or sizes.keys().isdisjoint(storages(user)))
            for user in node.users
        ):
            found.add(node)
    return found


def _concrete(n: Any) -> int:
    """A size as a number: a symbol by the hint of the shapes that were traced."""
    hint = n if isinstance(n, int) else n.node.hint
    return int(hint or 0)
