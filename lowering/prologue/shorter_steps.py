# SPDX-License-Identifier: Apache-2.0
"""Shorter steps with the same result than those that Inductor's ops ask for one by one
(expressions.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    Step,
    arguments_of,
    kind_of,
    renumbered,
)

_ONE = ("constant", (1.0).hex(), "float")
_ZERO = ("constant", (0.0).hex(), "float")
_NOTHING: Step = ("",)


class Steps:
    """Distinct steps, and the kind of each."""

    def __init__(self, inputs: Sequence[torch.dtype]) -> None:
        self.steps: list[Step] = []
        self.kinds: list[str] = []
        self._inputs = inputs
        self._known: dict[Step, int] = {}

    def add(self, tree: Any) -> int:
        """Adds a tree of steps; returns the index of its root. An integer is an earlier step."""
        if not isinstance(tree, tuple):
            return int(tree)
        name, *args = tree
        step = (name, *(self.add(a) if isinstance(a, tuple) else a for a in args))
        if step not in self._known:
            self._known[step] = len(self.steps)
            self.kinds.append(kind_of(step, self.kinds, self._inputs))
            self.steps.append(step)
        return self._known[step]


def shorter(steps: Sequence[Step], name: str, args: Sequence[int]) -> Any:
    """A shorter form of operation `name` of earlier steps, as a step's index or a tree of steps;
    None if there is none.

    before                                      after
        x * 1                                   x, which torch 2.11's sigmoid is multiplied by
        1 + erf(x)                                  erf_plus_one(x)
        y / (1 + exp(-x))                           y * sigmoid(x)
        1 / (1 + exp(-x))                           sigmoid(x)
        where(c, where(c, v, w), u)                 where(c, v, u)
        (a + where(i < n, v, 0))                    (a + where(i < n, v, w)) + 0
           + where(i >= n, w, 0)

    The first and the last two (of RoPE) have the same bits: adding 0 changes only -0, which becomes
    0 in both forms. The others differ by some ulp (prologue.cuh)."""
    if name == "where":
        inner, *of = steps[args[1]]
        same = inner == "where" and of[0] == args[0]
        return ("where", args[0], of[1], args[2]) if same else None
    if name in ("truediv", "reciprocal"):
        return _by_sigmoid(steps, name, args)
    if name == "mul":
        return next((other for other, one in (args, args[::-1]) if steps[one] == _ONE), None)
    if name != "add":
        return None
    what, *of = _beside_one(steps, args)
    if what == "erf":
        return ("erf_plus_one", *of)
    return _either_half(steps, args)


def contracted(
    steps: Sequence[Step], inputs: Sequence[torch.dtype]
) -> tuple[list[Step], dict[int, int]]:
    """Steps with fused multiply-adds, which ptxas forms in Triton's code, too, unless
    emulate_precision_casts is set; and the new index of each old step.

    before                                      after
        a * b + c, a * b - c, c - a * b             fma(a, b, c), fma(a, b, -c), fma(-a, b, c)
        (y * s) * (1 + x * (1 - s))                 y * fma(x * s, 1 - s, s)

    The first applies if nothing else reads a * b. In the second, SiLU's backward, s is sigmoid(x);
    a gated MLP's other operand needs x * s as well."""
    made, number = Steps(inputs), dict[int, int]()
    readers = Counter(arg for step in steps for arg in arguments_of(step))
    for i, step in enumerate(steps):
        name, *args = step
        plain = renumbered(step, number)
        way, is_float = None, name in ("add", "sub", "mul") and made.kinds[plain[1]] == "float"
        if name == "mul" and is_float:
            way = _silu_backward(made.steps, plain[1:])
        elif is_float:
            products = [readers[arg] == 1 and steps[arg][0] == "mul" for arg in args]
            way = _contracted(made.steps, name, plain[1:], products)
        number[i] = made.add(plain if way is None else way)
    return made.steps, number


def _contracted(
    steps: Sequence[Step], name: str, args: Sequence[int], products: Sequence[bool]
) -> Any:
    a, b = args
    if products[0]:
        return ("fma", *steps[a][1:], b if name == "add" else ("neg", b))
    if products[1]:
        x, y = steps[b][1:]
        return ("fma", x if name == "add" else ("neg", x), y, a)
    return None


def _silu_backward(steps: Sequence[Step], args: Sequence[int]) -> Any:
    """The second form of `contracted`, where the sum is an fma already."""
    for product, factor in (args, args[::-1]):
        (mul, *of), (fma, *terms) = steps[product], steps[factor]
        if mul != "mul" or fma != "fma" or steps[terms[2]] != _ONE:
            continue
        x, rest, _ = terms
        for y, s in (of, of[::-1]):
            if steps[s] == ("sigmoid", x) and steps[rest] == ("sub", terms[2], s):
                return ("mul", y, ("fma", ("mul", x, s), rest, s))
    return None


def _by_sigmoid(steps: Sequence[Step], name: str, args: Sequence[int]) -> Any:
    divisor, *of = steps[args[-1]]
    what, *inner = _beside_one(steps, of) if divisor == "add" else _NOTHING
    negated, *x = steps[inner[0]] if what == "exp" else _NOTHING
    if negated != "neg":
        return None
    sigmoid = ("sigmoid", *x)
    return sigmoid if name == "reciprocal" else ("mul", args[0], sigmoid)


def _beside_one(steps: Sequence[Step], args: Sequence[int]) -> Step:
    """The other step, if one of two steps is the constant 1."""
    one, other = (steps[arg] for arg in args)
    return other if one == _ONE else one if other == _ONE else _NOTHING


def _either_half(steps: Sequence[Step], args: Sequence[int]) -> Any:
    for whole, half in (args, args[::-1]):
        added, *parts = steps[whole]
        for a, other in (parts, parts[::-1]) if added == "add" else ():
            first, second = _only_where(steps, other), _only_where(steps, half)
            if first and second and _exclude_each_other(steps, first[0], second[0]):
                return ("add", ("add", a, ("where", *first, second[1])), _ZERO)
    return None


def _exclude_each_other(steps: Sequence[Step], one: int, other: int) -> bool:
    """Whether exactly one of two comparisons of indices holds (indices are never NaN)."""
    (name, *of), (opposite, *same) = steps[one], steps[other]
    return (
        {name, opposite} == {"lt", "ge"} and of == same and all(steps[i][0] == "index" for i in of)
    )


def _only_where(steps: Sequence[Step], at: int) -> tuple[int, int] | None:
    """The condition and the value of a step that is 0 elsewhere."""
    name, *args = steps[at]
    if name != "where" or steps[args[2]] != _ZERO:
        return None
    return args[0], args[1]
