"""Shorter ways to a number than the steps that Inductor's ops ask for one by one (producers.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from q2compile.runtime_kernels.cuda.quantize.producer import Step

_ONE = ("constant", (1.0).hex(), "float")
_ZERO = ("constant", (0.0).hex(), "float")
_NOTHING: Step = ("",)


def shorter(steps: Sequence[Step], name: str, args: Sequence[int]) -> Any:
    """What is to be computed for operation `name` of earlier steps, or None for just that: a step
    whose arguments are numbers of steps, or such steps.

    before                                      after
        1 + erf(x)                                  erf_plus_one(x)
        y / (1 + exp(-x))                           y * sigmoid(x)
        1 / (1 + exp(-x))                           sigmoid(x)
        where(c, where(c, v, w), u)                 where(c, v, u)
        (a + where(i < n, v, 0))                    (a + where(i < n, v, w)) + 0
           + where(i >= n, w, 0)

    The last two, of RoPE's halves, have the same bits: a sum with 0 is what it was, but for -0,
    which becomes 0 in both. The others are some ulp apart (produced.cuh).
    """
    if name == "where":
        inner, *of = steps[args[1]]
        same = inner == "where" and of[0] == args[0]
        return ("where", args[0], of[1], args[2]) if same else None
    if name in ("truediv", "reciprocal"):
        return _by_sigmoid(steps, name, args)
    if name != "add":
        return None
    what, *of = _beside_one(steps, args)
    if what == "erf":
        return ("erf_plus_one", *of)
    return _either_half(steps, args)


def _by_sigmoid(steps: Sequence[Step], name: str, args: Sequence[int]) -> Any:
    divisor, *of = steps[args[-1]]
    what, *inner = _beside_one(steps, of) if divisor == "add" else _NOTHING
    negated, *x = steps[inner[0]] if what == "exp" else _NOTHING
    if negated != "neg":
        return None
    sigmoid = ("sigmoid", *x)
    return sigmoid if name == "reciprocal" else ("mul", args[0], sigmoid)


def _beside_one(steps: Sequence[Step], args: Sequence[int]) -> Step:
    """Of two numbers one of which is 1 the other's step."""
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
    """Whether of two comparisons of indices, which are no NaN, always one alone holds."""
    (name, *of), (opposite, *same) = steps[one], steps[other]
    return (
        {name, opposite} == {"lt", "ge"} and of == same and all(steps[i][0] == "index" for i in of)
    )


def _only_where(steps: Sequence[Step], at: int) -> tuple[int, int] | None:
    """The condition and the number of what is 0 elsewhere."""
    name, *args = steps[at]
    if name != "where" or steps[args[2]] != _ZERO:
        return None
    return args[0], args[1]
