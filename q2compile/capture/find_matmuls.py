# SPDX-License-Identifier: Apache-2.0
"""Find every matmul of a Dynamo graph, and say of each what it multiplies.

A matmul of activation × parameter, however spelled (`spellings`), is brought to one form, `Matmul`:
y = x wᵀ + bias with the views that lead there. Everything else that multiplies matrices is a
`NotTaken` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from q2compile.capture.call import Call, Scope
from q2compile.capture.matmul import Matmul, NotTaken
from q2compile.capture.spellings import call_of
from q2compile.graph.node_meta import FAILURE
from q2compile.graph.views import example
from q2compile.torch_internals.dynamo import control_flow, inner_graph, parameter_of

UNREAD = "could not be read"  # how the reason of a node begins that q2compile failed on


def find_matmuls(gm: fx.GraphModule) -> Iterator[Matmul | NotTaken]:
    """Every matmul of ``gm`` and of the graphs inside it (checkpoint bodies and other higher-order
    ops), in order of execution."""
    parameters = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        parameter = parameter_of(node)
        if parameter is not None:
            parameters[node] = parameter
    yield from _walk(Scope(gm, parameters))


def _walk(scope: Scope) -> Iterator[Matmul | NotTaken]:
    outside, depth = scope, 0  # of torch.func's transforms, which stand in the graph as brackets
    inside = replace(scope, opaque="inside torch.func (vmap, grad, ...), for which q2 has no rules")
    for node in list(scope.gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        scope = inside if depth else outside
        found = _read(scope, node)
        if found is not None:
            yield found
        elif node.op == "call_function":
            for inner in _inner_scopes(scope, node):
                yield from _walk(inner)


def _read(scope: Scope, node: fx.Node) -> Matmul | NotTaken | None:
    """The matmul that ``node`` computes; None if it computes none. A matmul that raises while it is
    read is left in BF16, with the error as the reason."""
    if FAILURE in node.meta:
        return unread(scope.gm, node, node.meta[FAILURE], _weight(scope, node))
    try:
        found = call_of(scope, node)
        return None if found is None else found[1](found[0])
    except control_flow():
        raise
    except Exception as error:
        return unread(scope.gm, node, error, _weight(scope, node))


def unread(
    gm: fx.GraphModule, node: fx.Node, error: Exception, parameter: nn.Parameter | None
) -> NotTaken:
    """Record a node that q2compile failed on, by a fault of ours: it is left as it was written."""
    why = f"{UNREAD}: {type(error).__name__}: {error}"
    name = getattr(node.target, "__name__", None) or str(node.target)
    return NotTaken(gm, node, name, why, parameter, unread=True)


def _weight(scope: Scope, node: fx.Node) -> nn.Parameter | None:
    try:
        return Call(scope, node, "", {}).weight()
    except Exception:
        return None


def _inner_scopes(scope: Scope, node: fx.Node) -> Iterator[Scope]:
    """The graphs that a higher-order op calls, each with the parameters among its inputs."""
    arguments = tree_leaves(node.args)
    bodies = [inner_graph(scope.gm, a) for a in arguments]
    operands = [a for a, body in zip(arguments, bodies, strict=True) if body is None]
    for body in bodies:
        if body is None:
            continue
        inner = Scope(body, opaque=scope.opaque or _why_opaque(node))
        placeholders = body.graph.find_nodes(op="placeholder")
        # The inputs are the last arguments of the op, one for each placeholder of the body.
        given = operands[len(operands) - len(placeholders) :]
        if len(operands) < len(placeholders):
            inner.opaque = inner.opaque or _not_followed(node)
            given = []
        for placeholder, value in zip(placeholders, given, strict=False):
            if _is_invoked(node) and isinstance(value, fx.Node):
                # Dynamo's own, made of equal parts of a graph, have no examples.
                placeholder.meta.setdefault("example_value", value.meta.get("example_value"))
            parameter = scope.parameter(value)
            if parameter is None:
                continue
            inner.parameters[placeholder] = parameter
            if not _is_or_is_one_of(placeholder, value):
                inner.opaque = inner.opaque or _not_followed(node)
        yield inner


def _is_invoked(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _why_opaque(node: fx.Node) -> str:
    name = str(node.target)
    if "autograd_function" in name:
        return "inside a custom autograd.Function, which has its own backward"
    if "flex_attention" in name:
        return "inside a score function of flex_attention, which gets one score at a time"
    return ""


def _not_followed(node: fx.Node) -> str:
    return f"inside {node.target}, whose inputs could not be followed"


def _is_or_is_one_of(placeholder: fx.Node, value: fx.Node) -> bool:
    """Whether a body sees its arguments whole; the body of a loop sees one part at a time."""
    seen = placeholder.meta.get("example_value")
    whole = example(value).shape
    return isinstance(seen, torch.Tensor) and seen.shape in (whole, whole[1:])
