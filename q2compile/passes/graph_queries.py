# SPDX-License-Identifier: Apache-2.0
"""Queries of FX graphs that passes share."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.runtime_kernels.ops.table import (
    GEMM,
    GEMM_MASKED_UNROTATE,
    GROUPED_GEMM,
    QuantizerCall,
)
from q2compile.runtime_kernels.registry import serves, serving

Q2 = "q2"
# Six arguments are their operands: a's three parts, then b's. The eighth and ninth are schemes.
GEMM_OPS = (GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM)
_aten, _prims = torch.ops.aten, torch.ops.prims
# Ops that may stand between a tensor and its quantizer. All are functions of their arguments.
# A matrix with other sizes.
RESHAPES = frozenset([_aten.reshape.default, _aten.view.default])
VIEWS_AND_CASTS = RESHAPES | frozenset(
    [_aten.permute.default, _aten.t.default]
    + [_aten._to_copy.default, _prims.convert_element_type.default]
)


def is_q2(node: fx.Node, *names: str) -> bool:
    """Whether ``node`` calls an op of the q2 namespace (one of ``names``, if any are given)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    namespace, _, name = target.name().partition("::")
    return namespace == Q2 and (not names or name in names)


def q2_nodes(graph: fx.Graph, *names: str) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if is_q2(node, *names))


def op_counts(graph: fx.Graph) -> Counter[str]:
    """How often each function is called."""
    counts = Counter(n.target for n in graph.nodes if n.op == "call_function")
    return Counter({str(target): n for target, n in counts.items()})


def device_of(node: fx.Node) -> torch.device:
    return node.meta["val"].device


def name_of(node: fx.Node) -> str:
    """The name of a q2 op, without its namespace."""
    target: Any = node.target
    return target.name().partition("::")[2]


def quantizer_served_by(call: QuantizerCall) -> str:
    """Name of the kernel that would run a quantizer's call."""
    return serving(call.spec.name, map_arg(call.positional, lambda n: n.meta["val"])).name


def is_served_by(op: Any, args: Any, *names: str) -> bool:
    """Whether a kernel of one of these names would run ``op``, a q2 OpOverload, on all these
    arguments."""
    name = op.name().partition("::")[2]
    return serves(name, map_arg(args, lambda n: n.meta["val"]), names)


def serves_quantizer(call: QuantizerCall, *names: str) -> bool:
    """Whether a kernel of one of these names would run a quantizer's call."""
    return is_served_by(call.spec.overload, call.positional, *names)


def is_forward_operand(call: QuantizerCall | None) -> bool:
    """Whether a call makes x or w for fprop: from a matrix, rowwise, deterministic."""
    if call is None or call.source_scheme is not None:
        return False
    return not (call.columnwise or call.draws)


def update_outputs(node: fx.Node) -> None:
    """Note what comes out of an op whose arguments have changed, by its fake."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*args, **kwargs)
    for output in node.users:
        assert output.target is operator.getitem
        output.meta["val"] = node.meta["val"][output.args[1]]


def producer(node: fx.Node) -> Any:
    """The node of the op behind one of its outputs: getitem(op, i) -> op; else the node itself."""
    return node.args[0] if node.target is operator.getitem else node


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a joint graph that come after an incoming gradient: the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
