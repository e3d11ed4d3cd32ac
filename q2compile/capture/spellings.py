# SPDX-License-Identifier: Apache-2.0
"""The spellings of a matmul: for each, what its arguments are called, and whether it is taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from q2compile.capture import expert_spellings
from q2compile.capture.call import COMPUTED, Call, Scope
from q2compile.capture.einsum_spellings import einsum
from q2compile.capture.matmul import Matmul, NotTaken, View
from q2compile.graph.views import called, example

aten = torch.ops.aten

_TRANSPOSED: tuple[View, ...] = (("transpose", (0, 1)),)


def _linear(call: Call) -> Matmul | NotTaken:
    x, w, bias = call.args["input"], call.args["weight"], call.args.get("bias")
    parameter = call.scope.parameter(w)
    if parameter is None and w.op == "placeholder":
        return call.left("the weight is an input of the graph, not an nn.Parameter")
    if parameter is None:
        return call.left(COMPUTED, call.scope.computed_from(w))
    bias, y_views = _bias_or_added(call, bias, example(w).shape[:-1])
    return call.taken(parameter, x, w, bias=bias, y_views=y_views)


def _bias_or_added(
    call: Call, summand: fx.Node | None, rows: Sequence[Any]
) -> tuple[fx.Node | None, tuple[View, ...]]:
    """A summand as the bias [N] of a weight with these rows, or else as views of the result."""
    if summand is not None and tuple(example(summand).shape) == tuple(rows):
        return summand, ()
    return None, _added(call, summand)


def _added(call: Call, summand: fx.Node | None) -> tuple[View, ...]:
    """The addition of a summand of any shape that broadcasts. Under autocast torch casts a summand
    before it is added, so the sum is of the result's dtype.
    """
    if summand is None:
        return ()
    dtype = example(call.node).dtype
    cast = () if example(summand).dtype == dtype else (("to", (dtype,)),)
    return (("add", (summand,)), *cast)


def _matmul(call: Call) -> Matmul | NotTaken:
    """x @ p, or p @ x as (xᵀ pᵀ)ᵀ; as addmm with a 1-D bias, or another summand added after."""
    a, b, summand = call.args.get("a"), call.args.get("b"), call.args.get("input")
    if not all(isinstance(n, fx.Node) for n in (a, b, *([] if summand is None else [summand]))):
        return call.left("addmm in the old form, with beta before its operands", call.weight())
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    if summand is not None and (call.args.get("beta", 1), call.args.get("alpha", 1)) != (1, 1):
        return call.left("addmm with beta or alpha other than 1", call.weight())
    if call.args.get("out_dtype") is not None:
        return call.left("a matmul with an out_dtype", call.weight())
    left, right = call.scope.parameter(a), call.scope.parameter(b)
    if left is not None and right is not None:
        return call.left("parameter × parameter: no activation to quantize", right)
    if right is not None and example(b).ndim == 2:
        bias, added = _bias_or_added(call, summand, example(b).shape[-1:])
        return call.taken(right, a, b, bias=bias, w_views=_TRANSPOSED, y_views=added)
    added = _added(call, summand)
    if left is not None and example(a).ndim == 2 and example(b).ndim >= 2:
        flip = (("transpose", (-2, -1)),)
        return call.taken(left, b, a, x_views=flip, y_views=(*flip, *added))
    experts = expert_spellings.batched(call, a, b, added)
    if experts is not None:
        return experts
    return call.left(*call.no_parameter(b, a))


_Handler = Callable[[Call], Matmul | NotTaken | None]


def _never(why: str) -> _Handler:
    return lambda call: call.left(why, call.weight())


# name shown, the targets that mean it, names of the positional arguments, handler
_TABLE: list[tuple[str, tuple[Any, ...], tuple[str, ...], _Handler]] = [
    (
        "linear",
        (F.linear, torch._C._nn.linear, aten.linear),
        ("input", "weight", "bias"),
        _linear,
    ),
    (
        "matmul",
        (torch.matmul, operator.matmul, operator.imatmul, "matmul", "__matmul__")
        + (torch.linalg.matmul, aten.matmul),
        ("a", "b"),
        _matmul,
    ),
    ("matmul", ("__rmatmul__",), ("b", "a"), _matmul),
    ("mm", (torch.mm, "mm", aten.mm), ("a", "b", "out_dtype"), _matmul),
    ("addmm", (torch.addmm, "addmm", aten.addmm), ("input", "a", "b", "out_dtype"), _matmul),
    ("bmm", (torch.bmm, "bmm", aten.bmm), ("a", "b", "out_dtype"), _matmul),
    (
        "baddbmm",
        (torch.baddbmm, "baddbmm", aten.baddbmm),
        ("input", "a", "b", "out_dtype"),
        _matmul,
    ),
    ("einsum", (torch.einsum, aten.einsum), ("equation", "operands"), einsum),
    (
        "attention",
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention),
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
        (torch.inner, "inner", torch.tensordot, torch.mv, "mv", torch.addmv, "addmv", "addmv_")
        + (torch.addbmm, "addbmm", "addbmm_", "addmm_", "baddbmm_", aten.addmm_, aten.baddbmm_)
        + (aten.mv, aten.addmv, aten.addbmm, torch.chain_matmul, torch.linalg.multi_dot)
        + (torch._addmm_activation, aten._addmm_activation),
        (),
        _never("a matmul in an unsupported form; use F.linear, @ or matmul"),
    ),
    (
        "grouped_mm",
        (torch._grouped_mm, F.grouped_mm),
        ("a", "b", "offs", "bias", "out_dtype"),
        expert_spellings.grouped,
    ),
    (
        "scaled_grouped_mm",
        (torch._scaled_grouped_mm,),
        (),
        _never("a grouped matmul of operands that are quantized already"),
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
        expert_spellings.grouped,
    )
}

_RENAMED = {
    **dict.fromkeys(("mat1", "mat_a", "batch1"), "a"),
    **dict.fromkeys(("other", "mat2", "mat_b", "batch2", "weight"), "b"),
}


def call_of(scope: Scope, node: fx.Node) -> tuple[Call, _Handler] | None:
    if node.op == "call_module":
        module = scope.gm.get_submodule(str(node.target))
        if isinstance(module, nn.Linear):
            why = "a module call that Dynamo did not inline; set inline_inbuilt_nn_modules=True"
            return Call(scope, node, "linear", {}), lambda call: call.left(why, module.weight)
        return None
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target).removesuffix(".default")
    if called(node) not in _SPELLINGS and name not in _FOREIGN:
        return _foreign_call(scope, node)
    spelling, names, handler = _SPELLINGS.get(called(node)) or _FOREIGN[name]
    positional = node.args
    if handler is einsum and len(positional) > 2:
        positional = (positional[0], positional[1:])
    args = dict(zip(names, positional, strict=False))
    for key, value in node.kwargs.items():
        if names and key in (
            "input",
            "self",
        ):  # the first argument, of torch's functions and of aten's
            key = names[0]
        args[key if key in names else _RENAMED.get(key, key)] = value
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
    if not takes_activation or call.weight(computed=False) is None:
        return None
    return call, _never(f"{name} is a custom op, and how it uses its weight is not known")
