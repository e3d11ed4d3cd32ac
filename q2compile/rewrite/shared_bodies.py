# SPDX-License-Identifier: Apache-2.0
"""Graphs that several calls share. The body of a torch.compiler.nested_compile_region serves every
layer that calls it, and what is rewritten for one layer would be rewritten for all.

before                                       after `own_bodies`
    y = invoke_subgraph(body, "body", x, v)      y = invoke_subgraph(body, "body_q2_0", x, v)
    z = invoke_subgraph(body, "body", y, w)      z = invoke_subgraph(body_q2_1, "body_q2_1", y, w)

Each call's body is then rewritten for that call, and `share_bodies` lets those that came out the
same be one again, so that a region is still compiled once for all layers of one recipe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.graph.node_meta import SITE
from q2compile.graph.nodes import is_q2, q2_nodes
from q2compile.torch_internals.dynamo import called_graphs, copied, inner_graph

_INVOKE = torch.ops.higher_order.invoke_subgraph


@dataclass(frozen=True)
class BodyCall:
    """``call``, in the graph of ``caller``, with ``body``, which the get_attr node ``name`` stands
    for. ``shared`` is the body that it had before it got its own.
    """

    caller: fx.GraphModule
    call: fx.Node
    name: fx.Node
    body: fx.GraphModule
    shared: fx.GraphModule


def own_bodies(gm: fx.GraphModule) -> list[BodyCall]:
    """Give every call in ``gm``, at any depth, bodies that no other call has; return the calls,
    those inside of a body before the call of the body.

    AOTAutograd caches a traced body of invoke_subgraph under the call's second argument, for as
    long as Dynamo compiles this frame, so a changed body needs a new one.
    """
    calls: list[BodyCall] = []
    _own_bodies(gm, set(), calls)
    return calls


def _own_bodies(gm: fx.GraphModule, owned: set[fx.GraphModule], calls: list[BodyCall]) -> None:
    own: list[BodyCall] = []  # all of this graph first, so that what is copied is as it came
    for node in [n for n in gm.graph.nodes if n.op == "call_function"]:
        own_body = partial(_own_body, gm, node, owned, own)
        before = node.all_input_nodes
        node.args, node.kwargs = map_arg(node.args, own_body), map_arg(node.kwargs, own_body)
        for unused in [n for n in before if not n.users]:
            gm.graph.erase_node(unused)
    for call in own:
        _own_bodies(call.body, owned, calls)
        if call.call.target is _INVOKE:
            name, identifier, *operands = call.call.args
            call.call.args = (name, f"{identifier}_q2_{len(calls)}", *operands)
        calls.append(call)


def _own_body(
    gm: fx.GraphModule,
    call: fx.Node,
    owned: set[fx.GraphModule],
    own: list[BodyCall],
    argument: fx.Node,
) -> fx.Node:
    """The new value of an argument: a copy, if it is a body that another call owns."""
    shared = inner_graph(gm, argument)
    if shared is None:
        return argument
    body, name = shared, argument
    if shared in owned:
        body, attribute = copied(shared), f"{argument.target}_q2_{len(own)}"
        gm.add_submodule(attribute, body)
        with gm.graph.inserting_before(call):
            name = gm.graph.get_attr(attribute)
    owned.add(body)
    own.append(BodyCall(gm, call, name, body, shared))
    return name


def share_bodies(calls: Iterable[BodyCall]) -> dict[int, int]:
    """Undo `own_bodies` for bodies of invoke_subgraph that differ in nothing but seed indices;
    return {a removed seed index: the one that replaces it}.

    The seed index keeps the draws of two equal layers with one gradient apart within a graph. Each
    call of a shared body draws for itself.
    """
    seed_indices: dict[int, int] = {}
    first_of: dict[Any, BodyCall] = {}
    sites: dict[fx.Node, list[str]] = {}
    for call in calls:
        if call.call.target is not _INVOKE:
            continue
        first = first_of.setdefault((call.caller, call.shared, _signature(call.body)), call)
        if first is call:
            continue
        for node, first_node in zip(_q2_nodes(call.body), _q2_nodes(first.body), strict=True):
            seed_indices[node.args[-1]] = first_node.args[-1]
            sites.setdefault(first_node, [_site(first_node)]).append(_site(node))
        call.call.args = (first.name, first.call.args[1], *call.call.args[2:])
        call.caller.graph.erase_node(call.name)
        call.caller.delete_submodule(str(call.name.target))
    for node, names in sites.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        node.meta["custom"] = {**node.meta["custom"], SITE: ", ".join(names[:2]) + more}
    return seed_indices


def _q2_nodes(body: fx.GraphModule) -> list[Any]:
    """The calls that `rewrite` inserted, in a fixed order. Their last argument is seed_index."""
    return [n for gm in called_graphs(body) for n in q2_nodes(gm.graph)]


def _site(node: fx.Node) -> str:
    return str(node.meta["custom"][SITE])


def _signature(body: fx.GraphModule) -> tuple[Any, ...]:
    """A key of what a body computes: all but seed indices and the names of inner bodies, to compare
    copies."""
    index = {node: f"%{i}" for i, node in enumerate(body.graph.nodes)}
    lines: list[Any] = []
    for node in body.graph.nodes:
        inner = inner_graph(body, node)
        args = node.args
        if is_q2(node):
            args = args[:-1]
        elif node.target is _INVOKE:
            args = (args[0], *args[2:])
        values = map_arg((args, dict(node.kwargs)), lambda n: index[n])
        lines.append((node.op, node.target if inner is None else _signature(inner), repr(values)))
    return tuple(lines)
