"""nn.MultiheadAttention is one opaque call in Dynamo's graph; its projections are linears all the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten


def inline_attention(gm: fx.GraphModule) -> int:
    """Replace each ``multi_head_attention_forward`` by the aten ops it is made of.

    before    out = multi_head_attention_forward(q, k, v, ..., in_proj_weight, ...)
    after     p = aten.linear(q, in_proj_weight, in_proj_bias)
              ...
              out = aten.linear(a, out_proj_weight, out_proj_bias)

    Returns how many were replaced. Inner graphs (checkpoint bodies) are visited too. Exact: the
    same function is traced, before autograd and autocast act on it.
    """
    count = 0
    for module in list(gm.modules()):
        if isinstance(module, fx.GraphModule):
            nodes = module.graph.find_nodes(
                op="call_function", target=F.multi_head_attention_forward
            )
            for node in nodes:
                _inline(module, node)
            if nodes:
                module.recompile()
            count += len(nodes)
    return count


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    flat, spec = tree_flatten((node.args, node.kwargs))
    inputs = [a for a in flat if isinstance(a, fx.Node)]
    traced = _trace(node.target, flat, spec, [n.meta["example_value"] for n in inputs])  # type: ignore[arg-type]
    values = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "get_attr":  # a constant made while tracing
                name = f"_q2_constant_{len(list(gm.buffers()))}"
                gm.register_buffer(name, getattr(traced, inner.target))
                values[inner] = gm.graph.get_attr(name)
                values[inner].meta["example_value"] = inner.meta.get("val")
            elif inner.op == "call_function":
                copy = gm.graph.node_copy(inner, lambda n: values[n])
                copy.meta = {**node.meta, "example_value": inner.meta.get("val")}
                values[inner] = copy
    results: Any = traced.graph.output_node().args[0]
    outputs = [values[o] if isinstance(o, fx.Node) else o for o in results]
    user: Any
    for user in list(node.users):  # getitem(call, 0) is the output, 1 the attention weights or None
        user.replace_all_uses_with(outputs[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def _trace(
    function: Callable[..., Any], flat: list[Any], spec: Any, examples: list[torch.Tensor]
) -> fx.GraphModule:
    """``function`` as a graph of aten ops over its tensor arguments, before autograd's dispatch."""

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = tree_unflatten(
            [next(rest) if isinstance(a, fx.Node) else a for a in flat], spec
        )
        return function(*args, **kwargs)

    return make_fx(call, tracing_mode="fake", pre_dispatch=True)(*examples)
