# SPDX-License-Identifier: Apache-2.0
"""Experts: however their matmuls are spelled, taken where the policy asks for them, and right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import q2compile.linear.experts  # noqa: F401  registers the ops
from q2compile import explain
from q2compile.compiler.post_grad_passes import PostGradPasses
from q2compile.errors import NotTakenError
from q2compile.graph.nodes import op_counts
from q2compile.graph.quantizers import quantizer_of
from q2compile.report.report import RunReport, collector
from tests.support import quantizer_calls as calls

E, K, N = 4, 32, 48


class Experts(nn.Module):
    """Two layers, each token with the expert that ``ids`` names: up [E, N, K], down [E, K, N]."""

    def __init__(self, layer: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, N, K, dtype=dtype) / K**0.5)
        self.down = nn.Parameter(torch.randn(E, K, N, dtype=dtype) / N**0.5)
        self.layer = layer

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(self.layer(x, self.up, ids).relu(), self.down, ids)


def grouped(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    ids, order = ids.sort(stable=True)
    counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
    y = torch._grouped_mm(x[order], w.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    return y[order.argsort()]


def looked_up(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(w[ids], x.unsqueeze(-1)).squeeze(-1)


def looked_up_transposed(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (x.unsqueeze(1) @ w.index_select(0, ids).mT).squeeze(1)


def looked_up_of_transposed(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), w.transpose(1, 2)[ids]).squeeze(1)


def looked_up_einsum(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Two experts for each place, in the second half of OpenAI's gpt-oss."""
    pairs = ids.view(-1, 2)
    return torch.einsum("beck,bek->bec", w[pairs, ...], x.view(*pairs.shape, -1)).flatten(0, 1)


def equal_groups(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """The same number of tokens for each expert, in order."""
    return torch.bmm(x.view(E, -1, x.shape[1]), w.transpose(1, 2)).flatten(0, 1)


def equal_groups_weight_first(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (w @ x.view(E, -1, x.shape[1]).mT).mT.flatten(0, 1)


def equal_groups_added(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    x = x.view(E, -1, x.shape[1])
    return torch.baddbmm(x.new_ones(E, 1, 1), x, w.mT).flatten(0, 1)


def equal_groups_einsum(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Two batches, the experts' dimension inside, as GShard writes it."""
    x = x.view(E, 2, -1, x.shape[1]).transpose(0, 1)
    return torch.einsum("becd,efd->becf", x, w).transpose(0, 1).flatten(0, 2)


def loop(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], w.shape[1])
    for e in range(E):
        rows = torch.where(ids == e)[0]
        y = y.index_add(0, rows, F.linear(x[rows], w[e]))
    return y


# Spelling -> how often each of up and down is a matmul of its own, and the op that it becomes.
SPELLINGS = {
    grouped: (1, "grouped_linear"),
    looked_up: (1, "indexed_linear"),
    looked_up_transposed: (1, "indexed_linear"),
    looked_up_of_transposed: (1, "indexed_linear"),
    looked_up_einsum: (1, "indexed_linear"),
    equal_groups: (1, "batched_linear"),
    equal_groups_weight_first: (1, "batched_linear"),
    equal_groups_added: (1, "batched_linear"),
    equal_groups_einsum: (1, "batched_linear"),
    loop: (E, "batched_linear"),  # a stack of one
}
ROUTED = [grouped, looked_up, loop]


def tokens(layer: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """200 tokens and their experts, none for the second; equal groups have theirs by place."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if layer is grouped else torch.float32
    ids = torch.tensor([0, 2, 3])[torch.multinomial(torch.tensor([0.1, 0.3, 0.6]), 200, True)]
    return torch.randn(200, K, dtype=dtype, requires_grad=True), ids


def built(layer: Any) -> Experts:
    """torch traces _grouped_mm in bf16 alone."""
    return Experts(layer, torch.bfloat16 if layer is grouped else torch.float32)


class One(nn.Module):
    """The first layer alone."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.layer = built(layer).up, layer

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x, self.up, ids)


@pytest.fixture(autouse=True)
def _loops_in_one_graph() -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        yield


def compiled(model: nn.Module, **options: Any) -> tuple[Any, RunReport]:
    """The model under the backend, and the report that fills while it runs."""
    report = RunReport()

    def call(*args: Tensor) -> Tensor:
        token = collector.set(report)
        try:
            return run(*args)
        finally:
            collector.reset(token)

    settings = {"inner": "eager", "strict": True, **options}
    run = torch.compile(model, backend="quartet2", options=settings)
    return call, report


def cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


# ---- each spelling under the backend -------------------------------------------------------------


@pytest.mark.parametrize("layer", [grouped, looked_up, equal_groups, loop])
def test_a_step_of_each_op(layer: Any) -> None:
    model, (x, ids) = built(layer), tokens(layer)
    dy = torch.randn_like(x)
    call, report = compiled(model)
    inputs = [x, model.up, model.down]
    own = torch.autograd.grad(model(x, ids), inputs, dy)
    y = call(x, ids)
    grads = torch.autograd.grad(y, inputs, dy)

    each, _ = SPELLINGS[layer]
    rows = [(row.module, row.taken, row.why) for row in report.rows]
    assert rows == [("up", True, "")] * each + [("down", True, "")] * each
    shapes = [row.shape for row in report.rows]
    assert layer is loop or shapes == [(E, 200, N, K), (E, 200, K, N)]
    assert layer is not loop or [shape[0] for shape in shapes] == [1] * 2 * E
    # fprop's operands have relative errors of sqrt(0.0075), those of the backward of sqrt(0.0094)
    # (q2compile tables); behind a gradient there are up to two GEMMs of each kind: a cosine of
    # 1 / sqrt(1 + 2 * 0.015 + 2 * 0.019) = 0.967. The relu that flips with x̂ takes its part, too.
    assert cosine(y, model(x, ids)) > 0.97
    for grad, right in zip(grads, own, strict=True):
        assert grad.dtype == right.dtype
        assert cosine(grad, right) > 0.93
    if layer in ROUTED:
        assert all(grad[1].abs().max() == 0 for grad in grads[1:])  # the expert without tokens
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in (1, 2):
                x, ids = tokens(layer, seed)
                call(x, (ids + seed) % E).sum().backward()  # another expert is empty
        assert report.graphs == 1


# A loop is several linears. They and grouped matmuls are compiled by Inductor in
# tests/q2compile/passes/test_gather_scattered.py and tests/q2compile/test_backend.py.
@pytest.mark.parametrize("layer", [looked_up, equal_groups])
def test_inductor_gives_what_eager_gives(layer: Any) -> None:
    """One layer, from the same seed. Random rounding differs where a sum is rounded differently."""
    model, (x, ids), results = One(layer), tokens(layer), []
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        y = compiled(model, inner=inner)[0](x, ids)
        torch.manual_seed(1)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, model.up))))
    for ours, reference in zip(*results, strict=True):
        assert cosine(ours, reference) > 0.999


@pytest.mark.usefixtures("only_rewritten")
@pytest.mark.parametrize("layer", SPELLINGS)
def test_each_spelling_computes_the_same(layer: Any) -> None:
    """With the GEMMs left in high precision only the rewrite itself is under test."""
    model, (x, ids) = One(layer), tokens(layer)
    off = {"base": "quartet2", "fprop": "bf16", "dgrad": "bf16"}  # wgrad keeps it a rewrite
    call, report = compiled(model, policy={"up": off})
    y, own = call(x, ids), model(x, ids)
    each, _ = SPELLINGS[layer]
    assert [(row.module, row.taken) for row in report.rows] == [("up", True)] * each
    assert layer is loop or report.rows[0].shape == (E, 200, N, K)
    tolerance = 2e-2 if layer is grouped else 1e-5  # bf16 rounds 2^-9 of each layer
    torch.testing.assert_close(y, own, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(y)
    (dx,), (own_dx,) = (torch.autograd.grad(out, x, dy) for out in (y, own))
    torch.testing.assert_close(dx, own_dx, rtol=tolerance, atol=tolerance)


def test_no_recompile_when_the_number_of_tokens_changes() -> None:
    model = built(looked_up)
    call, report = compiled(model)
    for tokens_now in (200, 120, 77, 3):
        x, ids = tokens(looked_up)
        call(x[:tokens_now], ids[:tokens_now]).sum().backward()
    assert report.graphs == 2  # the second with a symbol


def test_experts_as_modules_in_a_loop() -> None:
    """Each is an ordinary linear with a graph of its own; a row without tokens is no fault."""
    layers = nn.ModuleList(nn.Linear(K, N) for _ in range(E))
    x, ids = tokens(looked_up)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        for layer in layers:
            layer.compile(backend="quartet2", options={"inner": "eager"})
        y = x.new_zeros(200, N)
        for e, layer in enumerate(layers):
            rows = torch.where(ids == e)[0]
            y = y.index_add(0, rows, layer(x[rows]))
        y.square().mean().backward()
    assert [bool(layer.weight.grad.any()) for layer in layers] == [True, False, True, True]
    assert x.grad.isfinite().all()


BOTH = "quantize rowwise+columnwise"


def test_a_loop_of_modules_fills_the_chunks_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are linears, with as many rows as data decide, and with a known few: wgrad has
    them as one group (linear/autograd.py, of_rows), from one read of the gradient. A whole
    chunk is no group."""
    counts: list[Counter[str]] = []
    run = PostGradPasses.__call__

    def counted(self: PostGradPasses, graph: torch.fx.Graph) -> None:
        run(self, graph)
        gradients = calls.nodes(graph, rotated=True, rowwise=True)
        counts.append(Counter(quantizer_of(node).label for node in gradients))

    monkeypatch.setattr(PostGradPasses, "__call__", counted)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(K, N) for _ in range(2))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            y = x.new_zeros(x.shape[0], N)
            for e, expert in enumerate(self.experts):
                rows = torch.where(ids == e)[0]
                y = y.index_add(0, rows, expert(x[rows]))
            return y

    for rows in (200, 3000):
        call, report = compiled(Loop())
        x = torch.randn(rows, K, requires_grad=True)
        call(x, torch.arange(rows) % 2).sum().backward()
        assert all(row.taken for row in report.rows)
        assert counts[-1] == {f"{BOTH} grouped": 2}
    for rows, kind in ((20, f"{BOTH} grouped"), (128, BOTH)):
        torch._dynamo.reset()  # or the second size would be a symbol
        call, _ = compiled(nn.Linear(K, N))
        call(torch.randn(rows, K, requires_grad=True)).sum().backward()
        assert counts[-1] == {kind: 1}


# ---- what the policy says ------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts = built(equal_groups)
        self.head = nn.Linear(K, N)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(self.layers[0].experts(x, ids))


@pytest.mark.usefixtures("only_rewritten")
def test_experts_are_taken_as_any_linear_and_named_as_any() -> None:
    x, ids = tokens(equal_groups)
    report = explain(Nested(), x, ids, options={"inner": "eager", "strict": True})
    up, down, head = report.rows
    assert up.taken and down.taken and head.taken and up.wanted
    assert up.module == "layers.0.experts.up" and up.shape == (E, 200, N, K)
    asked = {"layers.*.experts.*": "nvfp4", "*down": "bf16"}
    report = explain(Nested(), x, ids, options={"inner": "eager", "policy": asked})
    assert [row.recipe for row in report.rows] == ["nvfp4", "bf16", "quartet2"]
    assert report.rows[1].why == "policy: '*down' says bf16"


@pytest.mark.usefixtures("only_rewritten")
def test_experts_whose_rows_cut_a_square_block_stay_in_bf16() -> None:
    x, ids = tokens(equal_groups)
    options = {"inner": "eager", "recipe": "mxfp4_2d"}
    report = explain(Nested(), x, ids, options=options)
    rows = {row.module: row for row in report.rows}
    up, head = rows["layers.0.experts.up"], rows["head"]
    assert N % 32 and not up.taken and up.wanted and head.taken
    assert up.why == f"experts of {N} rows: a block of mxfp4_2d has 32 and would span two experts"


SCORES = (
    lambda y: y,
    lambda y: y.softmax(-1),
    lambda y: F.softmax(y, dim=-1, dtype=torch.float32),
    lambda y: torch.sigmoid(y).view(-1, 16) + torch.ones(16),
    lambda y: y.sigmoid().t(),  # the experts choose tokens
)


class Routed(nn.Module):
    """Routers of 16 experts, as most models have them: scores, a bias, the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in SCORES)
        for layer in self.layers:
            layer.gate, layer.up = nn.Linear(K, 16), nn.Linear(K, 16)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer, scores in zip(self.layers, SCORES, strict=True):
            weight, chosen = torch.topk(scores(layer.gate(x).float()).reshape(200, 16), 2, dim=-1)
            total = total + (layer.up(x).gather(1, chosen) * weight).sum()
        return total


@pytest.mark.usefixtures("only_rewritten")
def test_a_router_stays_in_its_own_precision() -> None:
    x, eager = tokens(equal_groups)[0], {"inner": "eager", "strict": True}
    rows = explain(Routed(), x, options=eager).rows
    assert [row.module for row in rows] == [
        f"layers.{i}.{name}" for i in range(len(SCORES)) for name in ("gate", "up")
    ]
    for gate, up in zip(rows[::2], rows[1::2], strict=True):
        assert (gate.taken, gate.wanted, up.taken) == (False, False, True)
        assert gate.why.endswith("unless the policy names it, {'layers.*.gate': 'quartet2'}")
    asked = {**eager, "policy": {"layers.*.gate": "quartet2"}}
    assert all(row.taken for row in explain(Routed(), x, options=asked).rows)


@pytest.mark.usefixtures("only_rewritten")
def test_a_router_of_few_experts_is_no_more_wanted_than_one_of_many() -> None:
    """A policy that names it wants what can't be."""

    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(K, 8), nn.Linear(K, 16)

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
            return (self.up(x).gather(1, chosen) * weight).sum()

    x, eager = tokens(equal_groups)[0], {"inner": "eager", "strict": True}
    gate, up = explain(Few(), x, options=eager).rows
    assert (gate.taken, gate.wanted, up.taken) == (False, False, True)
    assert gate.why == f"too small: the weight is [8, {K}], a block has 16 values"
    with pytest.raises(NotTakenError, match="gate: too small"):
        explain(Few(), x, options={**eager, "policy": {"gate": "quartet2"}})


@pytest.mark.parametrize("equation, transposed", [("bk,benk->ben", False), ("bk,bekn->enb", True)])
def test_an_activation_for_several_weights_looked_up(equation: str, transposed: bool) -> None:
    """The first half of gpt-oss: each token for each of its experts."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(E, *((K, N) if transposed else (N, K))))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return torch.einsum(equation, x, self.w[ids])

    model, x = Looked(), torch.randn(60, K, requires_grad=True)
    ids = torch.arange(120).view(60, 2) % 3  # none for the last expert
    call, report = compiled(model)
    y, own = call(x, ids), model(x, ids)
    assert y.shape == own.shape and cosine(y, own) > 0.99
    assert [(row.taken, row.shape) for row in report.rows] == [(True, (E, 120, N, K))]
    dy = torch.randn_like(y)
    for ours, right in zip(
        *(torch.autograd.grad(out, (x, model.w), dy) for out in (y, own)), strict=True
    ):
        assert cosine(ours, right) > 0.98
        assert ours.shape != model.w.shape or not ours[3].any()


LEFT = {
    "the weight is 3-D, [4, 32, 48], and the activation [200, 32]": lambda x, w, ids: x @ w.mT,
    "more than one row each": lambda x, w, ids: x.view(20, 10, K) @ w[ids[:20]].mT,
    "einsum tk,tnk->n of weights looked up by an index": lambda x, w, ids: torch.einsum(
        "tk,tnk->n", x, w[ids]
    ),
    "grouped matmul with a bias or an out_dtype": lambda x, w, ids: torch._grouped_mm(
        x, w.mT, offs=torch.tensor([9, 9, 20, 200], dtype=torch.int32), out_dtype=torch.bfloat16
    ),
    "the weights are the first operand": lambda x, w, ids: torch._grouped_mm(
        w, x.mT, offs=torch.tensor([9, 9, 20, 200], dtype=torch.int32)
    ),
    "both sizes must be multiples of 16": lambda x, w, ids: torch.bmm(
        x.view(E, -1, K), w[:, :40].mT
    ),
    "broadcasts 'e', 1 in x and 4 in w": lambda x, w, ids: torch.einsum("etk,enk->etn", x[None], w),
    "is not activation × parameter, batched or not": lambda x, w, ids: torch.einsum(
        "etk,enk->en", x.view(E, -1, K), w
    ),
}


@pytest.mark.usefixtures("only_rewritten")
@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_has_its_reason(why: str) -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(E, N, K, dtype=torch.bfloat16))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return LEFT[why](x, self.w, ids)

    x, ids = tokens(grouped)
    (row,) = explain(Left(), x, ids, options={"inner": "eager", "policy": {"w": "nvfp4"}}).rows
    assert not row.taken and row.wanted and why in row.why
    with pytest.raises(NotTakenError, match="w: "):
        compiled(Left(), policy={"w": "nvfp4"})[0](x, ids)
    compiled(Left(), policy={"w": "bf16"})[0](x, ids)  # strict, but the policy says bf16


# ---- graphs --------------------------------------------------------------------------------------


FORWARD = {"quartet2": {"quantize": 4}, "fp8": {"quantize": 4, "amax": 4}}
BACKWARD = {
    "quartet2": {"quantize": 2, "requantize": 4},  # dy along N, and along each expert's tokens
    # Both directions of dy at once; codes of x are transposed in groups, and those of w.
    "fp8": {"quantize": 2, "amax": 2, "transpose": 4},
}


@pytest.mark.parametrize("recipe", BACKWARD)
@pytest.mark.parametrize("layer", [grouped, looked_up, equal_groups])
def test_graphs(layer: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of a step: only T is padded, and no seed is in the forward."""
    counts: dict[str, Counter[str]] = {}
    run = PostGradPasses.__call__

    def counted(self: PostGradPasses, graph: torch.fx.Graph) -> None:
        run(self, graph)
        kind = "backward" if any(n.name.startswith("tangents") for n in graph.nodes) else "forward"
        ours = op_counts(graph).items()
        counts[kind] = Counter({k.split(".")[1]: n for k, n in ours if k.startswith("q2.")})

    monkeypatch.setattr(PostGradPasses, "__call__", counted)
    model, (x, ids) = built(layer), tokens(layer)
    compiled(model, recipe=recipe)[0](x, ids).sum().backward()
    assert counts["forward"] == {**FORWARD[recipe], "grouped_gemm": 2}
    assert counts["backward"] == {**BACKWARD[recipe], "padded_ends": 1, "grouped_gemm": 4}


@pytest.mark.parametrize("layer", [looked_up, equal_groups])
def test_autocast_is_bmms(layer: Any) -> None:
    model, (x, ids) = built(layer), tokens(layer)
    call, _ = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x, ids)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert model.up.grad.dtype == torch.float32
