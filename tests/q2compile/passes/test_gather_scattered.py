# SPDX-License-Identifier: Apache-2.0
"""Rows that are scattered by a permutation and summed are gathered instead: in every spelling, with
sums that are rounded once. Other indices are left."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.graph.nodes import op_counts
from q2compile.passes.joint.gather_scattered import gather_scattered_pass
from q2compile.torch_internals.inductor import decompositions

TOKENS, TOP, K, EXPERTS = 24, 3, 16, 5
ROWS = TOKENS * TOP
aten = torch.ops.aten


def order_of(ids: Tensor) -> Tensor:
    return ids.sort(stable=True).indices


def inverse_of(order: Tensor) -> Tensor:
    counted = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).index_put([order], counted)


def of_tokens(ids: Tensor, rows: Tensor) -> Tensor:
    """Hugging Face's, backward."""
    return rows.new_zeros(TOKENS, K).index_put([order_of(ids) // TOP], rows, accumulate=True)


def in_32_bits(ids: Tensor, rows: Tensor) -> Tensor:
    index = (order_of(ids).int() // TOP).view(TOP, -1).view(-1).long()
    return rows.new_zeros(TOKENS, K).index_put([index], rows, accumulate=True)


def by_scatter(ids: Tensor, rows: Tensor) -> Tensor:
    """torchtitan's, forward and backward."""
    index = (order_of(ids) // TOP).reshape(-1, 1).expand(-1, K)
    return rows.new_zeros(TOKENS, K).scatter_add(0, index, rows)


def to_something(ids: Tensor, rows: Tensor) -> Tensor:
    base = rows[:TOKENS] * 4
    return base.index_put([order_of(ids) // TOP], rows, accumulate=True)


def of_the_permutation(ids: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(rows).index_put([order_of(ids)], rows, accumulate=True)


def of_the_inverse(ids: Tensor, rows: Tensor) -> Tensor:
    inverse = inverse_of(order_of(ids))
    return torch.zeros_like(rows).index_put([inverse], rows, accumulate=True)


def of_an_argsort(ids: Tensor, rows: Tensor) -> Tensor:
    inverse = order_of(ids).argsort()
    return torch.zeros_like(rows).index_put([inverse], rows, accumulate=True)


def of_descending_ranks(ids: Tensor, rows: Tensor) -> Tensor:
    """A permutation, but not the inverse of the one that is sorted."""
    index = order_of(ids).sort(descending=True).indices
    total = torch.zeros_like(rows).index_put([index], rows, accumulate=True)
    return total + 0 * rows[order_of(ids)]


def with_an_inverse(ids: Tensor, rows: Tensor) -> Tensor:
    """The inverse already exists, made by a scatter."""
    order = order_of(ids)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(ROWS))
    total = rows.new_zeros(TOKENS, K).index_put([order // TOP], rows, accumulate=True)
    return total + 0 * rows[inverse[:TOKENS]]


def put_in_place(ids: Tensor, rows: Tensor) -> Tensor:
    """torchtitan's, forward: of what was there nothing stays."""
    return torch.full_like(rows, 7.0).index_put([order_of(ids)], rows)


def of_weights(ids: Tensor, rows: Tensor) -> Tensor:
    """Vectors."""
    return rows.new_zeros(ROWS).index_put([order_of(ids)], rows[:, 0], accumulate=True)


SPELLINGS = [of_tokens, in_32_bits, by_scatter, to_something, of_the_permutation, of_the_inverse]
SPELLINGS += [of_an_argsort, of_descending_ranks, with_an_inverse, put_in_place, of_weights]


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(EXPERTS, (ROWS,), generator=generator)
    return ids, torch.randn(ROWS, K, generator=generator).to(dtype)


def traced(function: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    return make_fx(function, decompositions(), tracing_mode="fake")(*args)


def run(gm: fx.GraphModule, *args: Tensor) -> Tensor:
    gm.graph.lint()
    gm.recompile()
    return gm(*args)


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(function) -> None:
    """Sums of small integers, so that every order has the same."""
    ids, rows = inputs()
    rows = (4 * rows).round()
    gm = traced(function, ids, rows)
    want = gm(ids, rows)
    assert gather_scattered_pass(gm.graph) == 1
    gm.graph.eliminate_dead_code()
    assert torch.equal(run(gm, ids, rows), want)
    adds = [n for n in gm.graph.nodes if "scatter_add" in str(n.target) or n.args[3:4] == (True,)]
    inverses = [n for n in gm.graph.nodes if "index_put" in str(n.target)]
    known = function in (of_the_inverse, of_an_argsort, with_an_inverse)
    assert not adds and len(inverses) == (0 if known else 1)
    before = str(gm.graph)
    assert gather_scattered_pass(gm.graph) == 0 and str(gm.graph) == before


def test_the_graph() -> None:
    ids, rows = inputs()
    gm = traced(of_tokens, ids, rows)
    gather_scattered_pass(gm.graph)
    gm.graph.eliminate_dead_code()
    counts = op_counts(gm.graph)
    assert {op: n for op, n in counts.items() if "getitem" not in op} == {
        "aten.sort.stable": 1,
        "aten.full.default": 1,  # where the inverse goes
        "prims.iota.default": 1,
        "aten.index_put.default": 1,
        "aten._unsafe_index.Tensor": 1,
        "aten.view.default": 1,
        "aten.sum.dim_IntList": 1,
    }


def test_a_sum_is_rounded_once() -> None:
    """Random rows: the sum is the fp32 sum. Additions in bf16 are up to two roundings of partial
    sums away."""
    ids, rows = inputs()
    gm = traced(of_tokens, ids, rows)
    added = gm(ids, rows)
    gather_scattered_pass(gm.graph)
    made = run(gm, ids, rows)
    by_token = rows.float()[inverse_of(order_of(ids))].view(TOKENS, TOP, K)
    assert torch.equal(made, by_token.sum(1).bfloat16())
    exact = by_token.double().sum(1)
    assert (made - exact).abs().mean() < 0.8 * (added - exact).abs().mean()


def of_any_index(ids: Tensor, rows: Tensor) -> Tensor:
    return rows.new_zeros(TOKENS, K).index_put([ids], rows, accumulate=True)


def of_a_part(ids: Tensor, rows: Tensor) -> Tensor:
    order = order_of(ids)[: ROWS - TOP]
    return rows.new_zeros(TOKENS, K).index_put([order // TOP], rows[: ROWS - TOP], accumulate=True)


def of_more_rows(ids: Tensor, rows: Tensor) -> Tensor:
    """Some of which stay zero."""
    return rows.new_zeros(ROWS, K).index_put([order_of(ids) // TOP], rows, accumulate=True)


def of_another_quotient(ids: Tensor, rows: Tensor) -> Tensor:
    return rows.new_zeros(TOKENS, K).index_put([order_of(ids) // (TOP + 1)], rows, accumulate=True)


def put(ids: Tensor, rows: Tensor) -> Tensor:
    """The last row of each stays: no sum."""
    return rows.new_zeros(TOKENS, K).index_put([order_of(ids) // TOP], rows)


def of_a_narrow_index(ids: Tensor, rows: Tensor) -> Tensor:
    """The narrow index wraps around if there are more rows."""
    index = order_of(ids).to(torch.int8).long() // TOP
    return rows.new_zeros(TOKENS, K).index_put([index], rows, accumulate=True)


def of_a_part_of_the_columns(ids: Tensor, rows: Tensor) -> Tensor:
    index = (order_of(ids) // TOP).reshape(-1, 1).expand(-1, K // 2)
    return rows.new_zeros(TOKENS, K).scatter_add(0, index, rows)


def repeated(ids: Tensor, rows: Tensor) -> Tensor:
    """Each twice: no permutation."""
    order = order_of(ids[: ROWS // 2]).expand(2, -1).reshape(-1)
    return torch.zeros_like(rows).index_put([order], rows, accumulate=True)


def of_integers(ids: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(torch.int32)
    return rows.new_zeros(TOKENS, K).index_put([order_of(ids) // TOP], rows, accumulate=True)


def sorted_in_rows(ids: Tensor, rows: Tensor) -> Tensor:
    order = ids.view(TOP, -1).sort(1).indices.view(-1)
    return torch.zeros_like(rows).index_put([order], rows, accumulate=True)


def of_many_rows(ids: Tensor, rows: Tensor) -> Tensor:
    """Sums of 12, which are no sums but reductions."""
    return rows.new_zeros(ROWS // 12, K).index_put([order_of(ids) // 12], rows, accumulate=True)


def not_inverted(ids: Tensor, rows: Tensor) -> Tensor:
    """Put where the order says, but not what counts up from 0."""
    order = order_of(ids)
    counted = torch.arange(1, ROWS + 1) % ROWS
    index = torch.empty_like(order).index_put([order], counted)
    return torch.zeros_like(rows).index_put([index], rows, accumulate=True)


def of_one_row(ids: Tensor, rows: Tensor) -> Tensor:
    """A row for all."""
    return rows.new_zeros(TOKENS, K).index_put([order_of(ids) // TOP], rows[0], accumulate=True)


OTHERS = [of_any_index, of_a_part, of_more_rows, of_another_quotient, put, of_a_narrow_index]
OTHERS += [of_a_part_of_the_columns, of_many_rows, repeated, of_integers, sorted_in_rows]
OTHERS += [not_inverted, of_one_row]


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_is_left(function) -> None:
    gm = traced(function, *inputs())
    before = str(gm.graph)
    assert gather_scattered_pass(gm.graph) == 0 and str(gm.graph) == before


class Mixture(nn.Module):
    """Experts whose tokens are gathered, sorted by expert, and summed for each token."""

    def __init__(self, back: Callable[..., Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, 64, 32, generator=generator).bfloat16())
        self.back = back

    def forward(self, h: Tensor) -> Tensor:
        weights, ids = h[:, :EXPERTS].softmax(-1).topk(TOP)
        ids, order = ids.flatten().sort()
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offs = counts.cumsum(0).to(torch.int32)
        y = torch._grouped_mm(h[order // TOP], self.up.mT, offs=offs)
        y = y * weights.flatten()[order, None]
        return self.back(y, order, h.shape[0])


def hugging_face(y: Tensor, order: Tensor, tokens: int) -> Tensor:
    return y[inverse_of(order)].view(tokens, TOP, -1).sum(1)


def put_in_order(y: Tensor, order: Tensor, tokens: int) -> Tensor:
    rows = torch.zeros_like(y)
    rows[order] = y
    return rows.view(tokens, TOP, -1).sum(1)


def torchtitan(y: Tensor, order: Tensor, tokens: int) -> Tensor:
    index = (order // TOP).reshape(-1, 1).expand(-1, y.shape[1])
    return y.new_zeros(tokens, y.shape[1]).scatter_add(0, index, y)


BACK = [hugging_face, put_in_order, torchtitan]


def step(back: Callable[..., Tensor], tokens: int, seed: int = 1, **how: Any) -> list[Tensor]:
    torch.manual_seed(seed)
    model = Mixture(back)
    generator = torch.Generator().manual_seed(tokens)
    h = torch.randn(tokens, 32, generator=generator).bfloat16().requires_grad_()
    y = torch.compile(model, **how)(h)
    y.float().square().mean().backward()
    assert h.grad is not None and model.up.grad is not None
    return [y.detach(), h.grad, model.up.grad]


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative to their norm."""
    return float((one - other).float().norm() / other.float().norm())


@pytest.mark.parametrize("back", BACK, ids=lambda f: f.__name__)
def test_of_a_mixture(back, tmp_path) -> None:
    """Forward, gradient of the tokens and that of the weights. Sums of TOP bf16 values are off by
    TOP roundings, each at most 2^-9 of a partial sum. In eager code only the tokens' gradient
    differs."""
    torch._dynamo.reset()
    options = {"inner": "eager", "dump": str(tmp_path)}
    made = step(back, 40, backend="quartet2", options=options)
    records = json.loads((tmp_path / "graph_0" / "passes.json").read_text())
    (joint,) = (r for r in records if (r["graph"], r["name"]) == ("joint", "gather_scattered"))
    # Gradients of the weights and of the tokens; of Hugging Face's that of y, of torchtitan's two
    # y itself.
    assert joint["matches"] == 3
    text = (tmp_path / "graph_0" / "3_backward.txt").read_text()
    assert "index_put(" not in text and "scatter_add" not in text and "_unsafe_index" in text
    torch._dynamo.reset()
    options = {"inner": "eager", "disable_passes": ["gather_scattered"]}
    y, tokens, weights = map(_apart, made, step(back, 40, backend="quartet2", options=options))
    assert y == weights == 0 and tokens <= TOP * 2**-9


def test_of_a_mixture_under_inductor() -> None:
    """Inductor does not round sums in the kernel of the gather, so y differs from the sum of rows
    that are added one by one, and some codes of the gradient are rounded the other way. This moves
    gradients by less than half of the effect of other random bits."""
    options = {"inner": "eager", "disable_passes": ["gather_scattered"]}
    results = []
    for seed, how in ((1, {"inner": "inductor"}), (1, options), (2, options)):
        torch._dynamo.reset()
        results.append(step(torchtitan, 40, seed=seed, backend="quartet2", options=how))
    made, added, drawn = results
    y, tokens, weights = map(_apart, made, added)
    _, other_tokens, other_weights = map(_apart, drawn, added)
    assert y <= TOP * 2**-9
    assert tokens <= other_tokens / 2 and weights <= other_weights / 2


@pytest.mark.parametrize("back", [hugging_face, torchtitan], ids=lambda f: f.__name__)
def test_dynamic_sizes_and_inference(back, tmp_path) -> None:
    torch._dynamo.reset()
    options = {"inner": "eager", "dump": str(tmp_path)}
    for tokens in (40, 56):
        step(back, tokens, backend="quartet2", options=options, dynamic=True)
    records = json.loads((tmp_path / "graph_0" / "passes.json").read_text())
    found = {r["graph"]: r["matches"] for r in records if r["name"] == "gather_scattered"}
    assert found["joint"] == 3
    model = torch.compile(Mixture(back), backend="quartet2", options=options)
    with torch.no_grad():
        model(torch.randn(16, 32).bfloat16())
    records = json.loads((tmp_path / "graph_1" / "passes.json").read_text())
    found = {r["graph"]: r["matches"] for r in records if r["name"] == "gather_scattered"}
    assert found == {"forward": int(back is not hugging_face)}
