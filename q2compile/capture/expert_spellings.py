# SPDX-License-Identifier: Apache-2.0
"""Matmuls with one weight per group of rows: the calls in which experts of a mixture occur.

    x [T, K] by groups, w [E, K, N]        torch._grouped_mm(x, w, offs)             grouped_linear
    x [E, T, K], w [E, K, N]               torch.bmm(x, w), x @ w, einsum            batched_linear
    x [T, K], w [E, N, K], index [T]       torch.bmm(w[index], x.unsqueeze(-1))      indexed_linear
    x [T, K], w [E, N, K], index [T, j]    einsum("tk,tjnk->tjn", x, w[index])       indexed_linear

The first is transformers' ``grouped_mm``, the third its ``batched_mm``, the last OpenAI's gpt-oss.
In a Python loop over the experts each is an ordinary linear whose weight is a part of a parameter.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from q2compile.capture.call import Call
from q2compile.capture.matmul import Matmul, NotTaken, View
from q2compile.graph.views import argument, called, example, transposes, viewed

_MT: tuple[View, ...] = (("transpose", (-2, -1)),)


def grouped(call: Call) -> Matmul | NotTaken:
    """torch._grouped_mm and calls with the same arguments."""
    x, w, offs = call.args["a"], call.args["b"], call.args.get("offs")
    parameter = call.scope.parameter(w)
    if parameter is None:
        why = (
            "activation × activation"
            if call.weight() is None
            else "the weights are the first operand"
        )
        return call.left(f"grouped matmul: {why}", call.weight())
    if call.args.get("bias") is not None or call.args.get("out_dtype") is not None:
        return call.left("grouped matmul with a bias or an out_dtype", parameter)
    shapes = example(x).ndim, example(w).ndim
    if offs is None and shapes == (3, 3):
        return _batched(call, x, w, ())
    if offs is None or shapes != (2, 3):
        return call.left(f"grouped matmul of {shapes[0]}-D × {shapes[1]}-D", parameter)
    return call.taken(parameter, x, w, w_views=_MT, op="grouped_linear", groups=offs)


def batched(
    call: Call, a: fx.Node, b: fx.Node, y_views: tuple[View, ...]
) -> Matmul | NotTaken | None:
    """a @ b where one is a stack of weights; None when neither is."""
    if call.scope.parameter(a) is not None or call.scope.parameter(b) is not None:
        return _batched(call, a, b, y_views)
    return _indexed(call, a, b, y_views)


def _batched(call: Call, a: fx.Node, b: fx.Node, added: tuple[View, ...]) -> Matmul | NotTaken:
    """x [E, T, K] @ w [E, K, N], or w [E, N, K] @ x [E, K, T] as the transpose of xᵀ wᵀ."""
    flipped = call.scope.parameter(b) is None
    w, x = (a, b) if flipped else (b, a)
    parameter = call.scope.parameter(w)
    assert parameter is not None
    x_shape, w_shape = example(x).shape, example(w).shape
    # As text, since comparing a symbol with a number would be a guard.
    if len(x_shape) != 3 or len(w_shape) != 3 or str(x_shape[0]) != str(w_shape[0]):
        return call.left(
            f"the weight is {len(w_shape)}-D, {list(w_shape)}, and the activation "
            f"{list(x_shape)}; 2-D weights are taken, and 3-D ones with an activation for each",
            parameter,
        )
    if flipped:
        views = {"x_views": _MT, "y_views": (*_MT, *added)}
    else:
        views = {"w_views": _MT, "y_views": added}
    return call.taken(parameter, x, w, op="batched_linear", **views)


def _indexed(
    call: Call, a: fx.Node, b: fx.Node, added: tuple[View, ...]
) -> Matmul | NotTaken | None:
    """x [T, 1, K] @ w[index] [T, K, N], or w[index] [T, N, K] @ x [T, K, 1]."""
    found, x, size = _look_up(call, b), a, -2
    flipped = found is None
    if flipped:
        found, x, size = _look_up(call, a), b, -1
    if found is None or example(found[1]).ndim != 1:
        return None
    w, index, transposed = found
    parameter = call.scope.parameter(w)
    assert parameter is not None
    if example(x).ndim != 3 or example(x).shape[size] != 1:
        return call.left("weights looked up by an index, with more than one row each", parameter)
    rows, weights = str(example(x).shape[0]), str(example(index).shape[0])
    if rows != weights:
        return call.left(
            f"{rows} activation(s) for {weights} weights looked up: matmul broadcasts, q2 does not",
            parameter,
        )
    return call.taken(
        parameter,
        x,
        w,
        op="indexed_linear",
        groups=index,
        x_views=(("squeeze", (size,)),),
        w_views=() if transposed != flipped else _MT,
        y_views=(("unsqueeze", (size,)), *added),
    )


def einsum_look_up(
    call: Call, x: fx.Node, looked_up: fx.Node, xs: str, ws: str, out: str
) -> Matmul | NotTaken | None:
    """einsum "xs,ws->out" of an activation and w[index], a matrix for each place of the index; None
    if it is not that.

    "tk,tnk->tn"; with an index [T, j] "tk,tjnk->tjn", x for each j, and "tjk,tjnk->tjn".
    """
    found = _look_up(call, looked_up)
    if found is None or not (xs + ws + out).isalpha():
        return None
    w, index, transposed = found
    parameter, places = call.scope.parameter(w), ws[:-2]
    assert parameter is not None
    k, n = set(xs) & set(ws[-2:]), set(out) & set(ws[-2:])
    if (
        len(set(ws)) != len(ws)
        or len(set(xs)) != len(xs)
        or not (len(k) == len(n) == 1 and k != n)
        or not set(xs) - k <= set(places)
        or sorted(out) != sorted({*places, *n})
    ):
        return call.left(f"einsum {xs},{ws}->{out} of weights looked up by an index", parameter)
    k_, n_ = k.pop(), n.pop()
    sizes = dict(zip(places, example(index).shape, strict=True))
    for letter, size in zip(xs, example(x).shape, strict=True):
        if str(sizes.get(letter, size)) != str(size):
            why = f"einsum of weights looked up by an index broadcasts {letter!r}"
            return call.left(why, parameter)
    missing = [i for i, letter in enumerate(places) if letter not in xs]
    x_views = permuted(xs, "".join(c for c in places if c in xs) + k_)
    if missing:
        wide = (*(-1 if c in xs else sizes[c] for c in places), -1)
        if not all(isinstance(size, int) for size in wide):
            return call.left(
                "einsum repeats the activation a number of times that varies", parameter
            )
        x_views += (*(("unsqueeze", (i,)) for i in missing), ("expand", wide))
    return call.taken(
        parameter,
        x,
        w,
        op="indexed_linear",
        groups=index,
        x_views=x_views,
        w_views=() if (ws[-1] == k_) != transposed else _MT,
        y_views=permuted(places + n_, out),
    )


def permuted(dims: str, order: str) -> tuple[View, ...]:
    """The view that puts dimensions of these letters into that order; none if they are in it."""
    return () if dims == order else (("permute", tuple(dims.index(c) for c in order)),)


def _look_up(call: Call, node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """``node`` as (weights, index, whether transposed after): w[index] of a 3-D parameter, or
    w.index_select(0, index).
    """
    transposed = False
    while transposes(node):
        transposed, node = not transposed, viewed(node)
    if not is_look_up(node):
        return None
    w, index = viewed(node), _index_of(node)
    matrices = call.scope.parameter(w) is not None and example(w).ndim == 3
    return (w, index, transposed) if matrices else None


def is_look_up(node: fx.Node) -> bool:
    """Whether ``node`` is w[index], w[index, ...] or w.index_select(0, index), with a tensor of
    integers."""
    if called(node) in _SELECTS:
        return bool(argument(node, 1, "dim") == 0)
    index = _index_of(node) if node.target is operator.getitem else None
    if not isinstance(index, fx.Node):
        return False
    value = index.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


_SELECTS = (torch.index_select, "index_select", torch.ops.aten.index_select)


def _index_of(look_up: fx.Node) -> Any:
    if called(look_up) in _SELECTS:
        return argument(look_up, 2, "index")
    index = look_up.args[1]
    whole = (Ellipsis, slice(None))
    if isinstance(index, tuple) and index and all(i in whole for i in index[1:]):
        return index[0]
    return index
