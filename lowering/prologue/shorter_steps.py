# SPDX-License-Identifier: Apache-2.0
"""Shorter steps with the same result as those that Inductor's ops ask for one by one
(expressions.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    Step,
    arguments_of,
    kind_of,
    renumbered,
)

# Rules: a tree of steps, and the one that replaces it. A capital stands for any step, I and N for
# indices, which are never NaN. Sums and products match in either order.
_ONE = ("constant", (1.0).hex(), "float")
_ZERO = ("constant", (0.0).hex(), "float")
_S, _DENOMINATOR = ("sigmoid", "X"), ("add", _ONE, ("exp", ("neg", "X")))
_RULES = (
    (("mul", "X", _ONE), "X"),  # torch 2.11 multiplies a sigmoid by 1
    # Three that differ by some ulp (prologue.cuh).
    (("add", _ONE, ("erf", "X")), ("erf_plus_one", "X")),
    (("truediv", "Y", _DENOMINATOR), ("mul", "Y", _S)),
    (("reciprocal", _DENOMINATOR), _S),
    # RoPE has these. Adding 0 changes only -0, which becomes 0 in both forms.
    (("where", "C", ("where", "C", "V", "W"), "U"), ("where", "C", "V", "U")),
    *(
        (
            ("add", ("add", "A", ("where", one, "V", _ZERO)), ("where", other, "W", _ZERO)),
            ("add", ("add", "A", ("where", one, "V", "W")), _ZERO),
        )
        for one, other in (
            (("lt", "I", "N"), ("ge", "I", "N")),
            (("ge", "I", "N"), ("lt", "I", "N")),
        )
    ),
)
# SiLU's backward. A gated MLP's other operand needs X * S as well.
_SILU_BACKWARD = (
    ("mul", ("mul", "Y", _S), ("fma", "X", ("sub", _ONE, _S), _ONE)),
    ("mul", "Y", ("fma", ("mul", "X", _S), ("sub", _ONE, _S), _S)),
)


class RecordedSteps:
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
    None if there is none."""
    return _by_rules(steps, (name, *args), _RULES)


def contracted(
    steps: Sequence[Step], inputs: Sequence[torch.dtype]
) -> tuple[list[Step], dict[int, int]]:
    """Steps with fused multiply-adds, which ptxas forms in Triton's code, too, unless
    emulate_precision_casts is set; and the new index of each old step.

        a * b + c, a * b - c, c - a * b  ->  fma(a, b, c), fma(a, b, -c), fma(-a, b, c)

    This applies if nothing else reads a * b.
    """
    made, number = RecordedSteps(inputs), dict[int, int]()
    readers = Counter(arg for step in steps for arg in arguments_of(step))
    for i, step in enumerate(steps):
        name, *args = step
        plain = renumbered(step, number)
        way, is_float = None, name in ("add", "sub", "mul") and made.kinds[plain[1]] == "float"
        if name == "mul" and is_float:
            way = _by_rules(made.steps, plain, (_SILU_BACKWARD,))
        elif is_float:
            products = [readers[arg] == 1 and steps[arg][0] == "mul" for arg in args]
            way = _contracted(made.steps, plain, products)
        number[i] = made.add(plain if way is None else way)
    return made.steps, number


def _contracted(steps: Sequence[Step], step: Step, products: Sequence[bool]) -> Any:
    name, a, b = step
    if products[0]:
        return ("fma", *steps[a][1:], b if name == "add" else ("neg", b))
    if products[1]:
        x, y = steps[b][1:]
        return ("fma", x if name == "add" else ("neg", x), y, a)
    return None


def _by_rules(steps: Sequence[Step], step: Step, rules: Sequence[tuple[Any, Any]]) -> Any:
    for pattern, tree in rules:
        for found in _matches(steps, pattern, step, {}):
            return _filled(tree, found)
    return None


def _filled(tree: Any, found: dict[str, int]) -> Any:
    """A tree with steps in place of its capitals."""
    if isinstance(tree, str):
        return found[tree]
    return tree if tree[0] == "constant" else (tree[0], *(_filled(t, found) for t in tree[1:]))


def _matches(
    steps: Sequence[Step], pattern: Any, step: Step, found: dict[str, int]
) -> Iterator[dict[str, int]]:
    """The ways in which capitals stand for steps. found: those that are known."""
    name, *args = pattern
    if name == "constant" and step == pattern:
        yield found
    elif name == step[0] != "constant":
        for order in (args, args[::-1]) if name in ("add", "mul") else (args,):
            yield from _each(steps, order, step[1:], found)


def _each(
    steps: Sequence[Step], patterns: Sequence[Any], args: Sequence[int], found: dict[str, int]
) -> Iterator[dict[str, int]]:
    if not patterns:
        yield found
        return
    pattern, at = patterns[0], args[0]
    if not isinstance(pattern, str):
        ways: Any = _matches(steps, pattern, steps[at], found)
    elif found.get(pattern, at) == at and (pattern not in "IN" or steps[at][0] == "index"):
        ways = [{**found, pattern: at}]
    else:
        ways = []
    for way in ways:
        yield from _each(steps, patterns[1:], args[1:], way)
