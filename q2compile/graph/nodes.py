# SPDX-License-Identifier: Apache-2.0
"""Calls of q2 ops in FX graphs: what they are, their arguments and their outputs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.runtime_kernels.choice import Choice, InGraph, choose
from q2compile.runtime_kernels.ops.table import GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM
from q2compile.runtime_kernels.registry import bound, parameters

# Six arguments are their operands: a's three parts, then b's (gemms.py).
GEMM_OPS = (GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM)
# The ops that the rewrite puts in place of matmuls. Their last arguments are the texts of a recipe
# and a seed index; then the codes of w, if any.
LINEAR_OPS = ("linear", "grouped_linear", "batched_linear", "indexed_linear")


def is_q2(node: fx.Node, *names: str) -> bool:
    """Whether ``node`` calls an op of the q2 namespace (one of ``names``, if any are given)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    namespace, _, name = target.name().partition("::")
    return namespace == "q2" and (not names or name in names)


def q2_nodes(graph: fx.Graph, *names: str) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if is_q2(node, *names))


def op_counts(graph: fx.Graph) -> Counter[str]:
    """How often each function is called."""
    counts = Counter(n.target for n in graph.nodes if n.op == "call_function")
    return Counter({str(target): n for target, n in counts.items()})


def device_of(node: fx.Node) -> torch.device:
    return node.meta["val"].device


def name_of(target: Any) -> str:
    """The name of a q2 op, without its namespace."""
    return target.name().partition("::")[2]


def values(args: Any) -> Any:
    """Arguments with the fakes of nodes in the place of these."""
    return map_arg(args, lambda n: n.meta["val"])


def choice_of(op: str, args: Any, graph: InGraph | None = None) -> Choice:
    """The kernel that would run an op on all these arguments, nodes among them, by their fakes."""
    return choose(op, values(args), graph)


def named_arguments(node: fx.Node) -> dict[str, object]:
    """All arguments of a q2 op by the names of its schema."""
    op = name_of(node.target)
    names = (name for name, _ in parameters(op))
    return dict(zip(names, bound(op, node.args, node.kwargs), strict=True))


def update_outputs(node: fx.Node) -> None:
    """Note what comes out of an op whose arguments have changed, by its fake."""
    target: Any = node.target
    args, kwargs = values((node.args, node.kwargs))
    node.meta["val"] = target(*args, **kwargs)
    for output in node.users:
        assert output.target is operator.getitem
        output.meta["val"] = node.meta["val"][output.args[1]]


def producer(node: fx.Node) -> Any:
    """The node of the op behind one of its outputs: getitem(op, i) -> op; else the node itself."""
    return node.args[0] if node.target is operator.getitem else node


def outputs_of(op: fx.Node) -> dict[Any, fx.Node]:
    """The nodes that are outputs of an op with several, by their number."""
    return {n.args[1]: n for n in op.users if n.target is operator.getitem}


def needed_behind(
    node: fx.Node, end: fx.Node, may_move: Callable[[fx.Node], bool]
) -> list[fx.Node] | None:
    """The nodes behind ``end`` that ``node`` is computed from, in order; None if one may not
    move."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for read in pending.pop().all_input_nodes:
            if end < read and read not in found:
                if not may_move(read):
                    return None
                found.add(read)
                pending.append(read)
    return sorted(found)


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """The incoming gradients of a joint or a backward graph."""
    return [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that come after an incoming gradient: the backward."""
    found = set(tangents(graph))
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
