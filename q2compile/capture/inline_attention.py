# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention is one opaque call in Dynamo's graph, and nn.TransformerEncoderLayer too
when it evaluates; their projections are linears all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from q2compile.graph.node_meta import FAILURE
from q2compile.torch_internals.dynamo import control_flow


def inline_attention(gm: fx.GraphModule) -> int:
    """Replace each ``multi_head_attention_forward``, and each fused encoder layer, by the aten ops
    that it is made of.

    before    out = multi_head_attention_forward(q, k, v, ..., in_proj_weight, ...)
    after     p = aten.linear(q, in_proj_weight, in_proj_bias)
              ...
              out = aten.linear(a, out_proj_weight, out_proj_bias)

    Returns how many were replaced. Inner graphs (checkpoint bodies) are visited too. Exact: the
    same function is traced, before autograd and autocast act on it. The fused encoder layer, which
    torch takes under no_grad in eval mode, is replaced by what the layer does in training: so a
    model is evaluated with the numerics it was trained with.
    """
    count = 0
    for module in list(gm.modules()):
        if isinstance(module, fx.GraphModule):
            nodes = [n for n in module.graph.nodes if _can_be_inlined(n)]
            inlined = sum(_inlined(module, node) for node in nodes)
            if inlined:
                module.recompile()
            count += inlined
    return count


def _inlined(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Inline one call if possible; an error is noted at the node, whose weights are then left."""
    last = node.prev
    try:
        _inline(gm, node)
    except control_flow():
        raise
    except Exception as error:
        while node.prev is not last:
            gm.graph.erase_node(node.prev)
        node.meta[FAILURE] = error.with_traceback(None)  # which would keep the frames
        return False
    return True


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    linear1_weight: Tensor,
    linear1_bias: Tensor,
    linear2_weight: Tensor,
    linear2_bias: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``torch._transformer_encoder_layer_fwd``: src [B, T, E]; mask is -inf or True where not to
    attend, [T, T] (type 0), [B, T] for the keys (1) or [B, H, T, T] (2).
    """

    def attention(x: Tensor) -> Tensor:
        projected = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (num_heads, -1)).transpose(1, 2) for p in projected)
        attended = None if mask is None else mask.to(torch.bool).logical_not()
        if attended is not None and mask_type == 1:
            attended = attended[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attended)
        return F.linear(y.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias)

    def mlp(x: Tensor) -> Tensor:
        hidden = F.linear(x, linear1_weight, linear1_bias)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), linear2_weight, linear2_bias)

    def norm1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm1_weight, norm1_bias, eps)

    def norm2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm2_weight, norm2_bias, eps)

    if norm_first:
        src = src + attention(norm1(src))
        return src + mlp(norm2(src))
    src = norm1(src + attention(src))
    return norm2(src + mlp(src))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: F.multi_head_attention_forward,
    torch._transformer_encoder_layer_fwd: _encoder_layer,
}


def _can_be_inlined(node: fx.Node) -> bool:
    """Whether a call can be inlined: not with nested tensors, since the layer needs their shape."""
    inputs = (n.meta["example_value"] for n in node.all_input_nodes)
    return node.target in _FUNCTIONS and not any(
        isinstance(x, Tensor) and x.is_nested for x in inputs
    )


def _specialized(argument: Any) -> Any:
    """A number that is symbolic under dynamic shapes, such as the dropout rate, as what it is now:
    reading it makes Dynamo guard it, as Inductor does with floats."""
    value = argument.meta["example_value"] if isinstance(argument, fx.Node) else None
    for symbolic, number in ((torch.SymFloat, float), (torch.SymInt, int)):
        if isinstance(value, symbolic):
            return number(value)
    return argument


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    flat, spec = tree_flatten((node.args, node.kwargs))
    flat = [_specialized(a) for a in flat]
    inputs = [a for a in flat if isinstance(a, fx.Node)]
    examples = [n.meta["example_value"] for n in inputs]
    traced = _trace(_FUNCTIONS[node.target], flat, spec, examples)
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
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(values[results])
        gm.graph.erase_node(node)
        return
    outputs = [values[o] if isinstance(o, fx.Node) else o for o in results]
    user: Any
    for user in list(node.users):  # getitem(call, 0) is the output, 1 the attention weights or None
        user.replace_all_uses_with(outputs[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def _trace(
    function: Callable[..., Any], flat: list[Any], spec: Any, examples: list[Tensor]
) -> fx.GraphModule:
    """``function`` as a graph of aten ops over its tensor arguments, before autograd's dispatch."""

    def call(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = tree_unflatten(
            [next(rest) if isinstance(a, fx.Node) else a for a in flat], spec
        )
        return function(*args, **kwargs)

    return make_fx(call, tracing_mode="fake", pre_dispatch=True)(*examples)
