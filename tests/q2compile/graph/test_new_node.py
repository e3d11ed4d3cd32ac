# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors, written into a graph."""

from __future__ import annotations

import threading

import torch
from torch._inductor.lowering import lowerings

from q2compile.graph.new_node import write
from tests.support.graph_builder import Builder


def cut_and_joined(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Composite ops, ops that are decomposed, one with several outputs of which one is read, and
    what nobody reads."""
    first, _ = x.flatten().masked_fill(x.flatten() > 1, 1.0).chunk(2)
    x.cos()
    return [first.reshape(4, -1) * 2, y]


def test_what_a_function_does_is_written_decomposed() -> None:
    b = Builder()
    x, y = b.placeholder("x", 8, 4, dtype=torch.float32), b.placeholder("y", 2)
    (made, same), written = write(y, cut_and_joined, x, y)
    gm = b.done(made, same)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert same is y and [node.target for node in written] == targets
    assert torch.ops.aten.cos.default not in targets and torch.ops.aten.clone.default not in targets
    namespaces = ("aten", "prims")
    assert all(t in lowerings for t in targets if getattr(t, "namespace", "") in namespaces)
    assert made.meta["val"].shape == (4, 4)
    values = torch.randn(8, 4), torch.randn(2).bfloat16()
    assert all(map(torch.equal, gm(*values), cut_and_joined(*values)))


def test_other_threads_are_not_written() -> None:
    b = Builder()
    x = b.placeholder("x", 8, dtype=torch.float32)

    def sum_in_a_thread(value: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch.ones(3).exp())
        thread.start()
        thread.join()
        return value.sum()

    _, written = write(x, sum_in_a_thread, x)
    assert [node.target for node in written] == [torch.ops.aten.sum.default]
