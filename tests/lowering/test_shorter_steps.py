# SPDX-License-Identifier: Apache-2.0
"""Steps of prologue expressions, and the shorter steps that replace them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from q2compile.lowering.prologue.shorter_steps import contracted, shorter
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression

ONE, ZERO = ("constant", (1.0).hex(), "float"), ("constant", (0.0).hex(), "float")
ROWS, COLS = 16, 64
X, Y, Z = (("load", i, f"(c + ({COLS} * r))", "lanes", -1) for i in range(3))
INDEX, HALF = ("index", "c", "first"), ("index", str(COLS // 2), "one")


def inputs() -> list[torch.Tensor]:
    """All pairs of values that are easily confused, many times."""
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, 3e-39, -2.5, float("nan"), 80.0])
    grid = torch.cartesian_prod(odd, odd, odd).t().reshape(3, 8, COLS)
    return [*torch.cat([grid, grid.flip(2)], 1).contiguous()]


def value(*steps: Any) -> torch.Tensor:
    """The number of the last step, by torch."""
    dtypes = (torch.float32,) * 3
    how = (torch.float32, ROWS, COLS, dtypes, False)
    (made,) = PrologueExpression(*how, tuple(steps), (len(steps) - 1,)).evaluate(inputs())
    return made


def written(steps: list[Any], tree: Any) -> int:
    """A tree added to steps; the number of its root."""
    if not isinstance(tree, tuple):
        return tree
    name, *args = tree
    at = [written(steps, a) for a in args]
    steps.append((name, *at))
    return len(steps) - 1


LOADS = (X, Y, Z)
SIGMOID = (*LOADS, ("neg", 0), ("exp", 3), ONE)
BELOW, ABOVE = ("lt", 3, 4), ("ge", 3, 4)
HALVES = (*LOADS, INDEX, HALF, BELOW, ABOVE, ZERO)  # x where c is below, y where it is not
# Steps, the operation, its arguments, what is made of it, and how many ulp that may be away.
SHORTER = {
    "x * 1": ((*LOADS, ONE), "mul", (0, 3), 0, 0),
    "1 * x": ((*LOADS, ONE), "mul", (3, 0), 0, 0),
    "1 + erf": ((*LOADS, ("erf", 0), ONE), "add", (4, 3), ("erf_plus_one", 0), 0),
    "erf + 1": ((*LOADS, ("erf", 0), ONE), "add", (3, 4), ("erf_plus_one", 0), 0),
    "silu": ((*SIGMOID, ("add", 4, 5)), "truediv", (0, 6), ("mul", 0, ("sigmoid", 0)), 4),
    "y by it": ((*SIGMOID, ("add", 5, 4)), "truediv", (1, 6), ("mul", 1, ("sigmoid", 0)), 4),
    "sigmoid": ((*SIGMOID, ("add", 5, 4)), "reciprocal", (6,), ("sigmoid", 0), 4),
    "twice": ((*HALVES, ("where", 5, 0, 7)), "where", (5, 8, 1), ("where", 5, 0, 1), 0),
    "halves": (
        (*HALVES, ("where", 5, 0, 7), ("add", 2, 8), ("where", 6, 1, 7)),
        *("add", (9, 10), ("add", ("add", 2, ("where", ("lt", 3, 4), 0, 1)), ZERO), 0),
    ),
    "halves, in another order": (
        (*HALVES, ("where", 6, 0, 7), ("add", 8, 2), ("where", 5, 1, 7)),
        *("add", (10, 9), ("add", ("add", 2, ("where", ("ge", 3, 4), 0, 1)), ZERO), 0),
    ),
}


@pytest.mark.parametrize("case", SHORTER)
def test_what_is_made_shorter(case) -> None:
    steps, name, args, want, ulp = SHORTER[case]
    tree = shorter(steps, name, args)
    assert tree == want
    made = [*steps]
    root = written(made, tree)
    got, plain = value(*made[: root + 1]), value(*steps, (name, *args))
    if ulp:
        torch.testing.assert_close(got, plain, rtol=ulp * 2.0**-23, atol=0, equal_nan=True)
    else:
        same = (got.view(torch.int32) == plain.view(torch.int32)) | (got.isnan() & plain.isnan())
        assert same.all()


LEFT = {
    "erf and another": ((*LOADS, ("erf", 0)), "add", (3, 1)),
    "2 + exp": (
        (*SIGMOID[:5], ("constant", (2.0).hex(), "float"), ("add", 4, 5)),
        "truediv",
        (0, 6),
    ),
    "not negated": ((*LOADS, ("exp", 0), ONE, ("add", 3, 4)), "truediv", (0, 5)),
    "other conditions": ((*HALVES, ("where", 5, 0, 7)), "where", (6, 8, 1)),
    "the same half": (
        (*HALVES, ("where", 5, 0, 7), ("add", 2, 8), ("where", 5, 1, 7)),
        *("add", (9, 10)),
    ),
    "comparisons of numbers, which may be NaN": (
        (*LOADS, X, Y, BELOW, ABOVE, ZERO, ("where", 5, 0, 7), ("add", 2, 8), ("where", 6, 1, 7)),
        *("add", (9, 10)),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case) -> None:
    steps, name, args = LEFT[case]
    assert shorter(steps, name, args) is None


DTYPES = (torch.float32,) * 3
SILU_BACKWARD = (
    *(*LOADS, ("sigmoid", 2), ("mul", 0, 3), ONE, ("sub", 5, 3)),
    *(("mul", 2, 6), ("add", 7, 5), ("mul", 4, 8)),
)
# Steps, and the last of the steps that replace them.
CONTRACTED = {
    "a b + c": ((*LOADS, ("mul", 0, 1), ("add", 3, 2)), ("fma", 0, 1, 2)),
    "c + a b": ((*LOADS, ("mul", 0, 1), ("add", 2, 3)), ("fma", 0, 1, 2)),
    "a b - c": ((*LOADS, ("mul", 0, 1), ("sub", 3, 2)), ("fma", 0, 1, ("neg", 2))),
    "c - a b": ((*LOADS, ("mul", 0, 1), ("sub", 2, 3)), ("fma", ("neg", 0), 1, 2)),
    "silu's backward": (
        SILU_BACKWARD,
        ("mul", 0, ("fma", ("mul", 2, 3), ("sub", ONE, 3), 3)),
    ),
}


def tree_of(steps: Any, at: int) -> Any:
    """A step as a tree: indices of earlier steps are replaced by these steps, except LOADS and a
    sigmoid."""
    name, *args = steps[at]
    if name == "constant":
        return steps[at]
    plain = ("load", "sigmoid")
    return (name, *(a if steps[a][0] in plain else tree_of(steps, a) for a in args))


@pytest.mark.parametrize("case", CONTRACTED)
def test_products_go_into_sums_unrounded(case) -> None:
    """A product's rounding is 2^-24 of it; of silu's backward, whose sum is y s (1 + x (1 - s)),
    each form rounds six times, by 2^-24 of |y| s (1 + |x|)."""
    steps, want = CONTRACTED[case]
    made, number = contracted(steps, DTYPES)
    assert tree_of(made, number[len(steps) - 1]) == want
    got, plain = value(*made[: number[len(steps) - 1] + 1]), value(*steps)
    x, y, z = inputs()
    s = z.sigmoid()
    bound = x.abs() * s * (1 + z.abs()) * 6 if "silu" in case else (x * y).abs() + plain.abs()
    near = (got - plain).abs() <= 2 * bound * 2.0**-24
    same = (got == plain) | (got.isnan() & plain.isnan())
    assert (near | same).all()


def test_du_reads_what_dg_is_made_of() -> None:
    steps = (*SILU_BACKWARD, ("mul", 2, 3), ("mul", 0, 10))
    made, number = contracted(steps, DTYPES)
    assert made.count(("mul", 2, 3)) == 1 and number[10] == made.index(("mul", 2, 3))
    assert made[made[number[9]][2]] == ("fma", number[10], number[6], number[3])


LEFT_APART = {
    "a product that is read twice": (
        *(*LOADS, ("mul", 0, 1), ("add", 3, 2)),
        ("mul", 3, 4),
    ),
    "integers": (
        *(*LOADS, ("cast", 0, "int"), ("mul", 3, 3)),
        *(("add", 4, 3), ("cast", 5, "float")),
    ),
    "rounded in between": (*LOADS, ("mul", 0, 1), ("round", 3, "bfloat16"), ("add", 4, 2)),
}


@pytest.mark.parametrize("case", LEFT_APART)
def test_what_is_not_contracted(case) -> None:
    steps = LEFT_APART[case]
    made, number = contracted(steps, DTYPES)
    assert tuple(made) == steps and all(old == new for old, new in number.items())
