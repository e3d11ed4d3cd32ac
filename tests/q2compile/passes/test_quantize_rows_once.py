# SPDX-License-Identifier: Apache-2.0
"""Rows that are gathered several times are quantized once, before the gather: in every spelling,
with every recipe, with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from q2compile.graph.node_meta import pop_notes
from q2compile.graph.nodes import op_counts, q2_nodes
from q2compile.passes.joint.quantize_rows_once import quantize_rows_once_pass
from q2compile.passes.verify import check_spec
from q2compile.recipes.recipe import GEMMS
from q2compile.telemetry.folder import flush
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import SOURCE, Builder, q2

E, TOP, TOKENS, K, N = 4, 4, 40, 64, 64
ROWS = TOP * TOKENS
aten = torch.ops.aten
ONE_THREAD = {"cpp.threads": 1}  # several add the gradient of h in any order


class Mixture(nn.Module):
    """Experts, each token with `TOP` of them; ids of E or more are other ranks' experts."""

    def __init__(self, gather: Callable[..., Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(E, N, K, generator=generator).bfloat16())
        self.gather = gather

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        ids, order = ids.flatten().sort(stable=True)
        x = self.gather(h, order, ids)
        counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
        offs = counts.cumsum(0).clamp(max=x.shape[0]).to(torch.int32)
        return torch._grouped_mm(x.bfloat16(), self.up.mT, offs=offs)


def hugging_face(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h[order // TOP]


def selected(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h.index_select(0, (order // TOP).int())


def spread(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h.gather(0, (order // TOP).view(-1, 1).expand(-1, K))


def in_two_dimensions(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h[(order // TOP).view(TOP, -1)].view(-1, K)


def converted(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h.float()[order // TOP, :].to(torch.bfloat16)


def of_the_first_half(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    """Rows that no index names, among them the largest and one with a NaN or Inf."""
    return h[order // TOP // 2]


def from_the_end(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h[order // TOP - TOKENS]


def sentinels(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    """Hugging Face's, expert parallel: rows of no expert here are zero."""
    x = h[order // TOP]
    return x.masked_fill_((ids >= E).unsqueeze(-1), 0.0)


def sentinels_by_where(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    x = h[order // TOP - TOKENS].float()
    return torch.where((ids < E)[:, None], x, torch.zeros_like(x)).bfloat16()


COVERING = [hugging_face, selected, spread, in_two_dimensions, converted]
OTHERS = [of_the_first_half, from_the_end, sentinels, sentinels_by_where]


def inputs(gather: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """An expert has no tokens, and rows that are not gathered would change the global scale."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(TOKENS, K, generator=generator)
    h[3] = 0
    h[5] *= 100
    ids = torch.rand(TOKENS, E + 2, generator=generator).topk(TOP).indices
    ids[ids == 1] = 0
    if gather is of_the_first_half:
        h[30], h[31, 7] = 1e6, float("nan")
    if gather in (sentinels, sentinels_by_where):
        h[8], ids[8] = 1e6, E
    elif gather not in (of_the_first_half, from_the_end):
        ids = ids.clamp(max=E - 1)
    return h.bfloat16().requires_grad_(), ids


def step(
    gather: Callable[..., Tensor], dynamic: bool | None = None, **options: Any
) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(2)
    model = Mixture(gather)
    h, ids = inputs(gather)
    y = torch.compile(model, backend="quartet2", options=options, dynamic=dynamic)(h, ids)
    y.float().square().mean().backward()
    assert h.grad is not None and model.up.grad is not None
    return [y.detach(), h.grad, model.up.grad]


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def matches(folder: Any) -> dict[str, Any]:
    records = json.loads((folder / "graph_0" / "passes.json").read_text())
    return {r["graph"]: r for r in records if r["name"] == "quantize_rows_once"}


@pytest.mark.parametrize(
    ("gather", "scale"),
    [(g, "pow2") for g in COVERING + OTHERS] + [(g, "exact") for g in (converted, sentinels)],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_bits(gather, scale, tmp_path) -> None:
    options = {"inner": "eager", "global_scale": scale}
    ours = step(gather, dump=str(tmp_path), **options)
    plain = step(gather, disable_passes=["quantize_rows_once"], **options)
    assert all(map(equal, ours, plain)) and ours[0].isfinite().all()
    joint = matches(tmp_path)["joint"]
    assert joint["matches"] == 1
    rows = TOKENS + (gather in (sentinels, sentinels_by_where))
    assert f"{TOKENS} rows are quantized for the {ROWS}" in joint["details"][0]
    forward = (tmp_path / "graph_0" / "2_forward.txt").read_text()
    assert ("index_put" in forward) == (gather not in COVERING)
    saved = forward.splitlines()[-1]
    backward = (tmp_path / "graph_0" / "3_backward.txt").read_text()
    assert "gather_rows" in backward and saved, "the backward gathers again"
    assert f"u8[{rows}, {K // 2}]" in backward and f"u8[{ROWS}, {K // 2}]" in backward


@pytest.mark.parametrize(
    ("gather", "recipe"),
    [(hugging_face, "mxfp4"), (hugging_face, "nvfp4")]
    + [(sentinels, "quartet"), (sentinels, "mxfp4_2d"), (sentinels, "fp8")]
    + [(hugging_face, "quartet2_fp8")],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_bits_of_other_recipes(gather, recipe, tmp_path) -> None:
    """nvfp4 quantizes x for wgrad anew; quartet has a mask, mxfp4_2d no global scale, FP8 no block
    scales. tetrajet2 quantizes in the forward as quartet2 does, without 4/6."""
    options = {"inner": "eager", "recipe": recipe}
    ours = step(gather, dump=str(tmp_path), **options)
    plain = step(gather, disable_passes=["quantize_rows_once"], **options)
    assert all(map(equal, ours, plain))
    # mxfp4 multiplies in bf16 in the forward.
    assert matches(tmp_path)["joint"]["matches"] == (recipe != "mxfp4")


def test_bits_of_inductors_code() -> None:
    """Sentinels need a row more than the tokens, here of as many as a symbol says. Constant sizes
    are compiled by Inductor in test_gather_scattered.py."""
    ours = step(sentinels, dynamic=True, inductor=ONE_THREAD)
    off = {"disable_passes": ["quantize_rows_once"]}
    plain = step(sentinels, dynamic=True, inductor=ONE_THREAD, **off)
    assert all(map(equal, ours, plain))


DYNAMIC = [in_two_dimensions, sentinels_by_where]


@pytest.mark.parametrize("gather", DYNAMIC, ids=lambda g: g.__name__)
def test_inference_and_dynamic_sizes(gather) -> None:
    results = []
    for off in ([], ["quantize_rows_once"]):
        torch._dynamo.reset()
        options = {"inner": "eager", "disable_passes": off}
        model = torch.compile(Mixture(gather), backend="quartet2", options=options, dynamic=True)
        h, ids = inputs(gather)
        torch.manual_seed(2)
        with torch.no_grad():
            results.append([model(h, ids)])
        y = model(h, ids)
        y.float().square().mean().backward()
        results[-1] += [y.detach(), h.grad, model.up.grad]
    assert all(map(equal, *results))


def graph(rows: int, tokens: int, scheme: str = SOURCE, *, stochastic: bool = False) -> Builder:
    """A quantizer of gathered rows that a dense GEMM reads, and a weight's."""
    b = Builder()
    h, w = b.placeholder("h", tokens, K), b.placeholder("w", N, K)
    index = b.placeholder("index", rows, dtype=torch.int64)
    seed = b.placeholder("seed", dtype=torch.int64) if stochastic else None
    x = b.call(aten.index.Tensor, h, [index])
    qx = b.outputs(b.call(calls.plain(x, None, seed, scheme, 0)))
    qw = b.outputs(b.call(calls.plain(w, None, None, SOURCE, 0)))
    y = b.call(q2.gemm.default, *qx, *qw, None, scheme, SOURCE, torch.bfloat16)
    b.done(y)
    return b


def test_the_graph() -> None:
    g = graph(64, 32).graph
    assert quantize_rows_once_pass(g) == 1
    g.lint()
    check_spec(g, "forward", "here")
    (gather,) = q2_nodes(g, "gather_rows")
    (gemm,) = q2_nodes(g, "gemm")
    assert gather.next.next.next is gemm, "made when it is read"
    assert gemm.args[2].args[0] is gather.args[0].args[0], "the global scale of all"
    assert op_counts(g)["aten.index.Tensor"] == 0, "nothing of x is left"
    assert pop_notes(g) == [
        "quantize_default: 32 rows are quantized for the 64 that are gathered from them"
    ]
    assert quantize_rows_once_pass(g) == 0 and pop_notes(g) == []


def test_what_is_left() -> None:
    """Too few rows; random bits, which depend on the position; blocks of several rows."""
    for b, note in (
        (graph(63, 32), ["quantize_default is left: 63 rows, gathered from 32"]),
        (graph(64, 32, "nvfp4_sr_pow2", stochastic=True), []),
        (graph(64, 32, "nvfp4_16x16_pow2"), []),
    ):
        before = str(b.graph)
        assert quantize_rows_once_pass(b.graph) == 0 and str(b.graph) == before
        assert pop_notes(b.graph) == note


def scaled(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h[order // TOP] * ids.bfloat16()[:, None]


def masked_in_part(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    x = h[order // TOP]
    return x.masked_fill(x > 1, 0.0)


def filled(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    return h[order // TOP].masked_fill((ids == 2)[:, None], 1.0)


@pytest.mark.parametrize("gather", [scaled, masked_in_part, filled], ids=lambda g: g.__name__)
def test_other_rows_are_left(gather, tmp_path) -> None:
    step(gather, inner="eager", dump=str(tmp_path))
    assert matches(tmp_path)["joint"]["matches"] == 0


def test_another_reader_of_the_rows_keeps_them(tmp_path) -> None:
    def gather(h: Tensor, order: Tensor, ids: Tensor) -> Tensor:
        x = h[order // TOP]
        seen.append(x)
        return x

    class Both(Mixture):
        def forward(self, h: Tensor, ids: Tensor) -> Tensor:
            y = super().forward(h, ids)
            return y + seen.pop().sum(1, keepdim=True)

    seen: list[Tensor] = []
    results = []
    for off in ([], ["quantize_rows_once"]):
        torch._dynamo.reset()
        options = {"inner": "eager", "disable_passes": off}
        model = Both(gather)
        h, ids = inputs(gather)
        y = torch.compile(model, backend="quartet2", options=options)(h, ids)
        torch.manual_seed(2)
        y.float().square().mean().backward()
        results.append([y.detach(), h.grad, model.up.grad])
    assert all(map(equal, *results))


class Layer(nn.Module):
    """torchtitan's: two stacks read the same rows, and a shared expert the tokens themselves."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w1, self.w3, shared = (
            nn.Parameter(torch.randn(E, N, K, generator=generator).bfloat16()) for _ in range(3)
        )
        self.shared = nn.Parameter(shared[0])
        self.checkpointed = checkpointed

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.run, h, ids, use_reentrant=False)
        return self.run(h, ids)

    def run(self, h: Tensor, ids: Tensor) -> Tensor:
        ids, order = ids.flatten().sort(stable=True)
        offs = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0).to(torch.int32)
        x = spread(h, order, ids)
        a, b = (torch._grouped_mm(x, w.mT, offs=offs) for w in (self.w1, self.w3))
        shared = nn.functional.linear(h, self.shared)
        return nn.functional.silu(a) * b + shared.repeat(TOP, 1)


def layers_step(checkpointed: bool, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    model = Layer(checkpointed)
    h, ids = inputs(spread)
    torch.manual_seed(2)
    y = torch.compile(model, backend="quartet2", options=options)(h, ids)
    y.float().square().mean().backward()
    assert h.grad is not None
    return [y.detach(), h.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("checkpointed", "keep_packed"), [(False, False), (True, False), (True, True)]
)
def test_bits_of_a_layer(checkpointed, keep_packed) -> None:
    options = {"inner": "eager", "keep_packed": keep_packed}
    ours = layers_step(checkpointed, **options)
    plain = layers_step(checkpointed, disable_passes=["quantize_rows_once"], **options)
    assert all(map(equal, ours, plain))


def test_who_shares_the_rows_shares_the_codes(tmp_path) -> None:
    """The forward alone. Inductor's own joint passes remove a view between h and a quantizer."""
    torch._dynamo.reset()
    model = torch.compile(Layer(), backend="quartet2", options={"dump": str(tmp_path)})
    model(*inputs(spread))
    forward = (tmp_path / "graph_0" / "2_forward.txt").read_text()
    assert forward.count("= q2.quantize(") == 1 + 3, "h, and three weights"
    assert forward.count("= q2.gather_rows(") == 1


def test_telemetry_records_the_rows_that_are_quantized(tmp_path) -> None:
    """Bits stay, and every operand is there; x's statistics are the tokens', each once."""
    recorded = step(sentinels, inner="eager", telemetry={"every": 1, "to": str(tmp_path)})
    flush()
    assert all(map(equal, recorded, step(sentinels, inner="eager")))
    rows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    found = [(r["gemm"], r["operand"]) for r in rows if "gemm" in r]
    assert found == [(gemm, role) for gemm, roles in GEMMS.items() for role in roles]
    assert rows[1]["scale_zero"] == pytest.approx(ZERO_ROWS / (TOKENS + 1))


ZERO_ROWS = 3  # one of zeros, one whose experts are elsewhere, and the one behind all


def test_an_amax_from_elsewhere_stays() -> None:
    b = Builder()
    h, index = b.placeholder("h", 32, K), b.placeholder("index", 64, dtype=torch.int64)
    amax = b.placeholder("amax", dtype=torch.float32)
    x = b.call(aten.index.Tensor, h, [index])
    b.done(*b.outputs(b.call(calls.plain(x, amax, None, "nvfp4_46", 0))))
    assert quantize_rows_once_pass(b.graph) == 1
    (quantize,) = q2_nodes(b.graph, "quantize")
    assert quantize.kwargs["amax"] is amax and isinstance(b.graph, fx.Graph)
