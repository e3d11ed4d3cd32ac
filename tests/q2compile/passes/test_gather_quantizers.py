# SPDX-License-Identifier: Apache-2.0
"""Quantizers that stand alone and move next to earlier ones: which, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from q2compile.graph.nodes import is_q2
from q2compile.passes.post_grad import gather_quantizers
from q2compile.passes.post_grad.gather_quantizers import gather_quantizers_pass
from tests.support.graph_builder import EDEN, SOURCE, q2, traced

aten = torch.ops.aten


def requantized(codes, seed, scheme=EDEN, rng_offset=1):
    return q2.requantize(
        *codes,
        source_scheme=SOURCE,
        scheme=scheme,
        transform="rht128",
        rows=72,
        columnwise_seed=seed,
        rng_offset=rng_offset,
    )


def gemm(a, b, scheme=EDEN):
    return q2.gemm(*a, *b, None, scheme, scheme, torch.bfloat16)


def backward(dy, *codes):
    """x for wgrad behind the GEMM of dgrad."""
    s, t = q2.seed(dy, 0), q2.seed(dy, 1)
    both = q2.quantize(
        dy,
        scheme=EDEN,
        transform="rht128",
        rowwise=True,
        columnwise=True,
        rowwise_seed=s,
        columnwise_seed=t,
    )
    dx = gemm(both[:3], requantized(codes, s))
    return dx, gemm(both[3:], requantized(codes, t, rng_offset=2))


def forward(dy, *codes):
    """Two weights, the second cast behind the GEMM of the first."""
    x = q2.quantize(dy, scheme=SOURCE, rowwise=True, columnwise=False)
    first = gemm(x, q2.quantize(dy, scheme=SOURCE, rowwise=True, columnwise=False), SOURCE)
    weight = aten._to_copy.default(dy, dtype=torch.float16)
    return first, gemm(
        x, q2.quantize(weight, scheme=SOURCE, rowwise=True, columnwise=False), SOURCE
    )


def no_room(dy, *codes):
    s, t = q2.seed(dy, 0), q2.seed(dy, 1)
    both = q2.quantize(
        dy,
        scheme=EDEN,
        transform="rht128",
        rowwise=True,
        columnwise=True,
        rowwise_seed=s,
        columnwise_seed=t,
    )
    w, more = requantized(codes, s), requantized(codes, t)
    dx = gemm(both[:3], w)
    return dx, gemm(both[3:], requantized(codes, t, rng_offset=2)), *more


def other_scheme(dy, *codes):
    s, t = q2.seed(dy, 0), q2.seed(dy, 1)
    dx = gemm(
        q2.quantize(
            dy, scheme=EDEN, transform="rht128", rowwise=True, columnwise=False, rowwise_seed=s
        ),
        requantized(codes, s),
    )
    return dx, *requantized(codes, t, "nvfp4_sr_pow2")


def made_late(dy, *codes):
    x = q2.quantize(dy, scheme=SOURCE, rowwise=True, columnwise=False)
    y = gemm(x, x, SOURCE)
    return q2.quantize(y.tanh(), scheme=SOURCE, rowwise=True, columnwise=False)


def order(graph: torch.fx.Graph) -> list[str]:
    names = [node.target.name()[4:] for node in graph.nodes if is_q2(node)]
    return [name for name in names if name != "seed"]


def results(gm: torch.fx.GraphModule, inputs: tuple) -> list[torch.Tensor]:
    gm.recompile()
    return [*gm(*inputs)]


@pytest.mark.parametrize(
    ("function", "after"),
    [
        (backward, ["quantize", "requantize", "requantize", "gemm", "gemm"]),
        (forward, ["quantize", "quantize", "quantize", "gemm", "gemm"]),
    ],
)
def test_a_lone_one_joins_those_before(function: Callable, after: list[str]) -> None:
    gm, inputs = traced(function)
    torch.manual_seed(5)
    before = results(gm, inputs)
    assert gather_quantizers_pass(gm.graph) == 1
    gm.graph.lint()
    assert order(gm.graph) == after
    torch.manual_seed(5)
    for got, want in zip(results(gm, inputs), before, strict=True):
        assert torch.equal(got, want)
    assert gather_quantizers_pass(gm.graph) == 0


@pytest.mark.parametrize("function", [no_room, other_scheme, made_late])
def test_what_stays(function: Callable) -> None:
    gm, _ = traced(function)
    before = order(gm.graph)
    assert gather_quantizers_pass(gm.graph) == 0
    assert order(gm.graph) == before


def test_what_would_be_held_for_long_stays(monkeypatch) -> None:
    """Up to the bound, in bytes."""
    gm, _ = traced(backward)
    made = [n for n in gm.graph.nodes if is_q2(n, "requantize")][1].meta["val"]
    size = sum(t.numel() * t.element_size() for t in made)
    monkeypatch.setattr(gather_quantizers, "SMALL", size - 1)
    assert gather_quantizers_pass(gm.graph) == 0
    monkeypatch.setattr(gather_quantizers, "SMALL", size)
    assert gather_quantizers_pass(gm.graph) == 1


def test_sizes_that_are_not_known_stay() -> None:
    gm, _ = traced(backward, "symbolic")
    assert gather_quantizers_pass(gm.graph) == 0
