"""Find every matmul of a Dynamo graph, and say of each what it multiplies.

A matmul of activation × parameter, however spelled, is brought to one form, `Matmul`: y = x wᵀ +
bias with the views that lead there. Everything else that multiplies matrices is a `Left` with the
reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from q2compile import capture_experts
from q2compile.compat import parameter_of
from q2compile.matmuls import Call, Left, Matmul, Scope, View, attribute, example

aten = torch.ops.aten

# ---- the spellings: each handler gives a Matmul or the reason why not
# --------------------------------


_TRANSPOSED: tuple[View, ...] = (("transpose", (0, 1)),)
_COMPUTED = "the weight is computed, not a parameter or a view of one"


def _linear(call: Call) -> Matmul | Left:
    x, w, bias = call.args["input"], call.args["weight"], call.args.get("bias")
    parameter = call.scope.parameter(w)
    if parameter is None and w.op == "placeholder":
        return call.left("the weight is an input of the graph, and no nn.Parameter")
    if parameter is None:
        return call.left(_COMPUTED, call.scope.computed_from(w))
    return call.taken(parameter, x, w, bias=bias)


def _matmul(call: Call) -> Matmul | Left:
    """x @ p, or p @ x as (xᵀ pᵀ)ᵀ; as addmm with a 1-D bias, or another summand added after."""
    a, b, summand = call.args["a"], call.args["b"], call.args.get("input")
    if summand is not None and (call.args.get("beta", 1), call.args.get("alpha", 1)) != (1, 1):
        return call.left("addmm with beta or alpha other than 1", call.weight())
    left, right = call.scope.parameter(a), call.scope.parameter(b)
    if left is not None and right is not None:
        return call.left("parameter × parameter: no activation to quantise", right)
    added: tuple[View, ...] = () if summand is None else (("add", (summand,)),)
    if right is not None and example(b).ndim == 2:
        is_bias = summand is not None and example(summand).shape == example(b).shape[-1:]
        bias = summand if is_bias else None
        y_views = () if is_bias else added
        return call.taken(right, a, b, bias=bias, w_views=_TRANSPOSED, y_views=y_views)
    if left is not None and example(a).ndim == 2 and example(b).ndim >= 2:
        flip = (("transpose", (-2, -1)),)
        return call.taken(left, b, a, x_views=flip, y_views=(*flip, *added))
    experts = capture_experts.batched(call, a, b, added)
    if experts is not None:
        return experts
    for operand in (b, a):
        parameter = call.scope.computed_from(operand)
        if parameter is not None:
            return call.left(_COMPUTED, parameter)
    return call.left("activation × activation")


def _einsum(call: Call) -> Matmul | Left:
    """Two operands, one a parameter with one index to contract: a matrix, or a stack of them with
    a matrix of activations for each.
    """
    equation, operands = call.args["equation"], call.args["operands"]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return call.left("einsum of other than two operands with an equation", call.weight())
    flags = [call.scope.parameter(o) for o in operands]
    if flags[0] is None and flags[1] is None:
        return call.left("activation × activation")
    if flags[0] is not None and flags[1] is not None:
        return call.left("parameter × parameter: no activation to quantise", flags[1])
    inputs, _, out = equation.replace(" ", "").partition("->")
    subs = inputs.split(",")
    x, w, xs, ws = operands[0], operands[1], subs[0], subs[1]
    if flags[0] is not None:
        x, w, xs, ws = w, x, ws, xs
    parameter = flags[0] if flags[0] is not None else flags[1]
    assert parameter is not None
    stack = capture_experts.einsum_views(xs, ws, out)
    views = stack or _einsum_views(xs, ws, out, example(x).ndim)
    if views is None:
        why = (
            f"einsum {equation!r} is not activation × parameter, or × one for each, over one index"
        )
        return call.left(why, parameter)
    x_views, w_views, y_views = views
    op = "batched_linear" if stack else "linear"
    return call.taken(parameter, x, w, op=op, x_views=x_views, w_views=w_views, y_views=y_views)


def _einsum_views(
    xs: str, ws: str, out: str, x_ndim: int
) -> tuple[tuple[View, ...], tuple[View, ...], tuple[View, ...]] | None:
    """The views that make einsum "xs,ws->out" a linear, None if it is not one.

    "btk,nk->btn": none.  "bkt,kn->btn": x.movedim(1, -1), w.transpose(0, 1).
    """
    batch = "".join(chr(0x100 + i) for i in range(x_ndim - len(xs.replace("...", ""))))
    xs, out = xs.replace("...", batch), out.replace("...", batch)
    shared = set(xs) & set(ws)
    if (
        len(ws) != 2
        or len(set(ws)) != 2
        or len(set(xs)) != len(xs)
        or len(shared) != 1
        or "." in ws
    ):
        return None
    k = shared.pop()
    n = ws.replace(k, "")
    rest = xs.replace(k, "")
    if n in xs or sorted(out) != sorted(rest + n) or out.replace(n, "") != rest:
        return None
    x_views = () if xs.endswith(k) else (("movedim", (xs.index(k), -1)),)
    w_views = () if ws.endswith(k) else _TRANSPOSED
    y_views = () if out.endswith(n) else (("movedim", (-1, out.index(n))),)
    return x_views, w_views, y_views


_Handler = Callable[[Call], Matmul | Left]


def _never(why: str) -> _Handler:
    return lambda call: call.left(why, call.weight())


# name shown, the targets that mean it, names of the positional arguments, handler
_TABLE: list[tuple[str, tuple[Any, ...], tuple[str, ...], _Handler]] = [
    (
        "linear",
        (F.linear, torch._C._nn.linear, aten.linear.default),
        ("input", "weight", "bias"),
        _linear,
    ),
    (
        "matmul",
        (torch.matmul, operator.matmul, operator.imatmul, "matmul", "__matmul__")
        + (torch.linalg.matmul, aten.matmul.default),
        ("a", "b"),
        _matmul,
    ),
    ("matmul", ("__rmatmul__",), ("b", "a"), _matmul),
    ("mm", (torch.mm, "mm", aten.mm.default), ("a", "b"), _matmul),
    ("addmm", (torch.addmm, "addmm", aten.addmm.default), ("input", "a", "b"), _matmul),
    ("bmm", (torch.bmm, "bmm", aten.bmm.default), ("a", "b"), _matmul),
    ("baddbmm", (torch.baddbmm, "baddbmm"), ("input", "a", "b"), _matmul),
    ("einsum", (torch.einsum,), ("equation", "operands"), _einsum),
    (
        "attention",
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default),
        (),
        lambda call: call.left("attention: activation × activation"),
    ),
    ("bilinear", (F.bilinear,), (), _never("bilinear: three operands")),
    (
        "multi_head_attention_forward",
        (F.multi_head_attention_forward, torch._native_multi_head_attention)
        + (torch._transformer_encoder_layer_fwd,),
        (),
        _never("this form of multi-head attention could not be taken apart into linears"),
    ),
    (
        "other product",
        (torch.inner, "inner", torch.tensordot, torch.mv, "mv", torch.addmv, "addmv")
        + (torch.addbmm, "addbmm", torch.chain_matmul, torch.linalg.multi_dot),
        (),
        _never("a product in a form that is not taken; F.linear, @ and matmul are"),
    ),
    (
        "grouped_mm",
        (torch._grouped_mm, F.grouped_mm),
        ("a", "b", "offs", "bias", "out_dtype"),
        capture_experts.grouped,
    ),
    (
        "scaled_grouped_mm",
        (torch._scaled_grouped_mm,),
        (),
        _never("a grouped matmul of operands that are quantised already"),
    ),
    (
        "recurrent",
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
        + (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        (),
        _never("a recurrent layer: its matmuls are inside one call"),
    ),
]
_SPELLINGS = {
    target: (name, arguments, handler)
    for name, targets, arguments, handler in _TABLE
    for target in targets
}

# Ops that other libraries register, by name: there is no target to name before they have.
_FOREIGN = {
    "transformers.grouped_mm_fallback": (
        "transformers.grouped_mm_fallback",
        ("a", "b", "offs"),
        capture_experts.grouped,
    )
}

_RENAMED = {
    **dict.fromkeys(("self", "mat1", "mat_a", "batch1"), "a"),
    **dict.fromkeys(("other", "mat2", "mat_b", "batch2", "weight"), "b"),
}


def _call_of(scope: Scope, node: fx.Node) -> tuple[Call, _Handler] | None:
    if node.op == "call_module":
        module = scope.gm.get_submodule(str(node.target))
        if isinstance(module, nn.Linear):
            why = "a module call that Dynamo did not inline; set inline_inbuilt_nn_modules=True"
            return Call(scope, node, "linear", {}), lambda call: call.left(why, module.weight)
        return None
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target).removesuffix(".default")
    if node.target not in _SPELLINGS and name not in _FOREIGN:
        return _foreign_call(scope, node)
    spelling, names, handler = _SPELLINGS.get(node.target) or _FOREIGN[name]
    positional = node.args
    if handler is _einsum and len(positional) > 2:
        positional = (positional[0], positional[1:])
    args = dict(zip(names, positional, strict=False))
    for key, value in node.kwargs.items():
        renamed = key if key in names else _RENAMED.get(key, key)
        if key == "input" and "input" not in names:
            renamed = "a"
        args[renamed] = value
    call = Call(scope, node, spelling, args)
    if args.get("out") is not None:
        return call, _never("writes into an out= tensor")
    if scope.opaque:
        return call, _never(scope.opaque)
    return call, handler


def _foreign_call(scope: Scope, node: fx.Node) -> tuple[Call, _Handler] | None:
    """A custom op that takes an activation and a weight may multiply them. One that takes a weight
    alone (an all-gather) or integers with it (a look-up) does not.
    """
    if not isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    name = str(node.target)
    if name.partition(".")[0] in ("aten", "prims"):
        return None
    call = Call(scope, node, name, {})
    takes_activation = any(
        isinstance(argument, fx.Node)
        and isinstance(argument.meta.get("example_value"), torch.Tensor)
        and example(argument).is_floating_point()
        and scope.parameter(argument) is None
        for argument in tree_leaves((node.args, node.kwargs))
    )
    if not takes_activation or call.weight() is None:
        return None
    return call, _never(f"{name} is a custom op: what it does with its weight is not known")


# ---- the walk
# ----------------------------------------------------------------------------------------


def find_matmuls(gm: fx.GraphModule) -> Iterator[Matmul | Left]:
    """Every matmul of ``gm`` and of the graphs inside it (checkpoint bodies and other higher-order
    ops), in order of execution."""
    parameters = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        parameter = parameter_of(node)
        if parameter is not None:
            parameters[node] = parameter
    yield from _walk(Scope(gm, parameters))


def _walk(scope: Scope) -> Iterator[Matmul | Left]:
    outside, depth = scope, 0  # of torch.func's transforms, which stand in the graph as brackets
    inside = replace(scope, opaque="inside torch.func (vmap, grad, ...), for which q2 has no rules")
    for node in list(scope.gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        scope = inside if depth else outside
        found = _call_of(scope, node)
        if found is not None:
            call, handler = found
            yield handler(call)
        elif node.op == "call_function":
            for body, inner in _inner_scopes(scope, node):
                assert body is inner.gm
                yield from _walk(inner)


def _inner_scopes(scope: Scope, node: fx.Node) -> Iterator[tuple[fx.GraphModule, Scope]]:
    """The graphs that a higher-order op calls, each with the parameters among its inputs.

    The inputs are the last arguments of the op, one for each placeholder of the body.
    """
    flat = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]
    bodies = [n for n in flat if n.op == "get_attr"]
    for body in bodies:
        gm = attribute(scope.gm, str(body.target))
        if not isinstance(gm, fx.GraphModule):
            continue
        inputs = [n for n in flat if n.op != "get_attr" or n not in bodies]
        placeholders = gm.graph.find_nodes(op="placeholder")
        inner = Scope(gm, opaque=scope.opaque)
        if "autograd_function" in str(node.target):
            inner.opaque = "inside a custom autograd.Function, which has its own backward"
        elif len(inputs) < len(placeholders):
            inner.opaque = f"inside {node.target}, whose inputs could not be followed"
        else:
            for placeholder, value in zip(placeholders, inputs[-len(placeholders) :], strict=False):
                parameter = scope.parameter(value)
                if parameter is not None:
                    inner.parameters[placeholder] = parameter
        yield gm, inner
