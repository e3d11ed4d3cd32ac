# SPDX-License-Identifier: Apache-2.0
"""torch.einsum of an activation and a parameter: in which equations it is a linear.

x [..., K], w [N, K]                "btk,nk->btn", in any order of the letters          linear
x [B, T, D], w [D, H, K]            "btd,dhk->bhtk": N is heads times width             linear
x [B, T, H, K], w [H, K, D]         "bthk,hkd->btd": K is heads times width             linear
x [E, T, K], w [E, K, N]            "etk,ekn->etn": a matrix for each e         batched_linear
x [T, K], w[index] [T, N, K]        "tk,tnk->tn": see `expert_spellings`        indexed_linear
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from q2compile.capture import expert_spellings
from q2compile.capture.call import Call
from q2compile.capture.expert_spellings import permuted
from q2compile.capture.matmul import Matmul, NotTaken, View
from q2compile.graph.views import example


@dataclass(frozen=True)
class _Equation:
    """An equation of two operands, "xs,ws->out", a letter for each dimension of x."""

    text: str
    xs: str
    ws: str
    out: str

    @classmethod
    def of(cls, text: str, xs: str, ws: str, out: str, x_ndim: int) -> _Equation:
        batch = _spelt_out("...", x_ndim - _letters(xs))
        return cls(text, _spelt_out(xs, x_ndim), ws, out.replace("...", batch))


def einsum(call: Call) -> Matmul | NotTaken | None:
    """Two operands, one of them a parameter: a matrix whose rows and columns may span several
    dimensions, or a stack of matrices with a matrix of activations for each. None for one operand.
    """
    text, operands = call.args["equation"], _operands(call.args.get("operands"))
    if isinstance(text, str) and len(operands) == 1:
        return None
    if not isinstance(text, str) or len(operands) != 2:
        return call.left("einsum that is not of two operands with an equation", call.weight())
    inputs, arrow, out = text.replace(" ", "").partition("->")
    subs = inputs.split(",")
    out = out if arrow else _implied(inputs)
    first, second = (call.scope.parameter(o) for o in operands)
    if first is not None and second is not None:
        return call.left("parameter × parameter: no activation to quantize", second)
    orders = ((0, 1), (1, 0))
    for x, w in orders if first is None and second is None else ():
        found = expert_spellings.einsum_look_up(
            call, operands[x], operands[w], subs[x], subs[w], out
        )
        if found is not None:
            return found
    if first is not None:
        (w, x), parameter = orders[0], first
    elif second is not None:
        (w, x), parameter = orders[1], second
    else:
        return call.left(*call.no_parameter(*operands))
    equation = _Equation.of(text, subs[x], subs[w], out, example(operands[x]).ndim)
    return _of_parameter(call, equation, operands[x], operands[w], parameter)


def _operands(given: Any) -> tuple[Any, ...]:
    """A node, a few nodes, or a list of them: einsum("...", x), ("...", x, w), ("...", [x, w])."""
    if isinstance(given, list | tuple):
        return _operands(given[0]) if len(given) == 1 else tuple(given)
    return () if given is None else (given,)


def _of_parameter(
    call: Call, equation: _Equation, x: fx.Node, w: fx.Node, parameter: nn.Parameter
) -> Matmul | NotTaken:
    # As text, since comparing a symbol with a number would be a guard.
    x_sizes = dict(zip(equation.xs, map(str, example(x).shape), strict=True))
    w_sizes = dict(zip(equation.ws, map(str, example(w).shape), strict=False))
    shown = f"einsum {equation.text!r}"
    for index, size in w_sizes.items():
        if x_sizes.get(index, size) != size:
            why = f"{shown} broadcasts {index!r}, {x_sizes[index]} in x and {size} in w"
            return call.left(why, parameter)
    views = _views(equation, tuple(example(w).shape))
    if views is None:
        return call.left(f"{shown} is not activation × parameter, batched or not", parameter)
    op, x_views, w_views, y_views = views
    return call.taken(parameter, x, w, op=op, x_views=x_views, w_views=w_views, y_views=y_views)


def _views(
    equation: _Equation, w_shape: tuple[int, ...]
) -> tuple[str, tuple[View, ...], tuple[View, ...], tuple[View, ...]] | None:
    """The op, and the views of x, w and y, that an einsum is; None if it is not one of them.

    "btk,nk->btn": none.  "bkt,kn->btn": x.permute(0, 2, 1), w.transpose(0, 1).
    "btd,dhk->bhtk": w.flatten(1, 2).transpose(0, 1), y.unflatten(2, (H, K)).permute(0, 2, 1, 3).
    "bthk,hkd->btd": x.flatten(2, 3), w.flatten(0, 1).transpose(0, 1).
    "ecd,edf->ecf": w.permute(0, 2, 1).  "gecd,efd->gecf": x.permute(1, 0, 2, 3) and y likewise.
    """
    xs, ws, out = equation.xs, equation.ws, equation.out
    each = "".join(c for c in ws if c in xs and c in out)
    k = "".join(c for c in ws if c in xs and c not in out)
    n = "".join(c for c in ws if c not in xs)
    rest = "".join(c for c in xs if c not in ws)
    if not (k and n and ws.isalpha() and len(w_shape) == len(ws)):
        return None
    if any(len(set(s)) != len(s) for s in (xs, ws)) or sorted(out) != sorted(rest + each + n):
        return None
    x_views = (*permuted(xs, each + rest + k), *_flattened(len(rest), len(k)))
    y_views = permuted(each + rest + n, out)
    if each:
        one = len(each) == len(k) == len(n) == 1
        return ("batched_linear", x_views, permuted(ws, each + n + k), y_views) if one else None
    if ws == k + n:  # views on either side, and a transpose that a kernel can read
        w_views = (*_flattened(len(k), len(n)), *_flattened(0, len(k)), ("transpose", (0, 1)))
    else:
        w_views = (*permuted(ws, n + k), *_flattened(len(n), len(k)), *_flattened(0, len(n)))
    sizes = tuple(w_shape[ws.index(c)] for c in n)
    if len(n) > 1 and not all(isinstance(size, int) for size in sizes):
        return None
    parts: tuple[View, ...] = (("unflatten", (len(rest), sizes)),) if len(n) > 1 else ()
    return "linear", x_views, w_views, (*parts, *y_views)


def _flattened(first: int, count: int) -> tuple[View, ...]:
    return (("flatten", (first, first + count - 1)),) if count > 1 else ()


def _implied(inputs: str) -> str:
    """The output of an equation without an arrow, as in torch: the dimensions of the ellipsis, then
    the letters that occur once, in alphabetical order, capitals first."""
    once = sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1)
    return "..." * ("..." in inputs) + "".join(once)


def _letters(subscripts: str) -> int:
    return len(subscripts.replace("...", ""))


def _spelt_out(subscripts: str, ndim: int) -> str:
    """The ellipsis as letters that no equation has, one for each dimension that it stands for."""
    batch = "".join(chr(0x100 + i) for i in range(ndim - _letters(subscripts)))
    return subscripts.replace("...", batch)
