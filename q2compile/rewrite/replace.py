# SPDX-License-Identifier: Apache-2.0
"""Replace one matmul by `q2::linear`, or by its variants for experts.

before                                             after
    y = torch._C._nn.linear(x, w, b)                   y = torch.ops.q2.linear.default(x, w, b,
                                                               'nvfp4_46_pow2 @ nvfp4_46_pow2', ...,
                                                               0)
    y = torch.matmul(x, w)          # w [K, N]         t = w.transpose(0, 1)
                                                       y = torch.ops.q2.linear.default(x, t, None,
                                                       ..., 1)
    y = torch._grouped_mm(x, v, offs)                  w = v.transpose(-2, -1)   # v [E, K, N]
                                                       y = torch.ops.q2.grouped_linear.default(
                                                               x, w, offs, ..., 2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import q2compile.linear.dense
import q2compile.linear.experts  # noqa: F401  registers q2::linear and its variants
from q2compile.capture.expert_spellings import is_look_up
from q2compile.capture.matmul import Matmul, View
from q2compile.graph.node_meta import SEED_INDEX
from q2compile.graph.views import example, is_view_or_cast, transposes, viewed
from q2compile.recipes.recipe import Recipe


def replace_by_linear(found: Matmul, recipe: Recipe, seed_index: int) -> fx.Node:
    """Replace one matmul by `q2::linear`, or a variant for experts, with its views. Returns the
    node of the result."""
    before = found.node.prev
    try:
        out = _built(found, recipe, seed_index)
    except Exception:  # the graph is as it was, and the caller says what could not be done
        while found.node.prev is not before:
            found.gm.graph.erase_node(found.node.prev)
        raise
    operands = found.node.all_input_nodes
    found.node.replace_all_uses_with(out)
    found.gm.graph.erase_node(found.node)
    for operand in operands:
        _erase_unused_views(found.gm.graph, operand)
    return out


def _built(found: Matmul, recipe: Recipe, seed_index: int) -> fx.Node:
    """The new nodes, before the one that they stand for; returns that of the result."""
    graph, node = found.gm.graph, found.node
    site = {**node.meta.get("custom", {}), SEED_INDEX: seed_index}
    with graph.inserting_before(node):
        x = with_views(graph, found.x, found.x_views)
        w = with_views(graph, found.w, found.w_views)
        third = {"linear": (found.bias,), "batched_linear": ()}.get(found.op, (found.groups,))
        op = getattr(torch.ops.q2, found.op).default
        y = graph.call_function(op, (x, w, *third, *recipe.texts(), seed_index))
        y.meta = {**node.meta, "custom": site}
        if found.y_views:
            with torch.no_grad():
                shape = (*example(x).shape[:-1], example(w).shape[-2])
                y.meta["example_value"] = example(node).new_empty(shape)
        out = with_views(graph, y, found.y_views)
    out.meta = {**node.meta, "custom": site}
    return out


def _erase_unused_views(graph: fx.Graph, node: Any) -> None:
    """Erase views without readers: an undone transpose, a look-up of weights, a view of a view."""
    while not node.users and (is_view_or_cast(node) or is_look_up(node)):
        unused, node = node, viewed(node)
        graph.erase_node(unused)


def with_views(graph: fx.Graph, node: fx.Node, views: tuple[View, ...]) -> fx.Node:
    """``node`` after ``views``; a transpose of a transpose is the tensor itself."""
    for method, args in views:
        if _undoes(node, method, args):
            node = viewed(node)
            continue
        new = graph.call_method(method, (node, *args))
        operands = [example(a) if isinstance(a, fx.Node) else a for a in args]
        with torch.no_grad():
            new.meta = {"example_value": getattr(example(node), method)(*operands)}
        node = new
    return node


def _undoes(node: fx.Node, method: str, args: tuple[Any, ...]) -> bool:
    """Whether the view is a transpose, and ``node`` the same transpose."""
    n = example(node).ndim
    return method == "transpose" and {a % n for a in args} == {n - 2, n - 1} and transposes(node)
