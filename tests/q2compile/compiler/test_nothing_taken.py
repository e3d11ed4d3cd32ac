# SPDX-License-Identifier: Apache-2.0
"""A graph in which nothing is taken is Inductor's own: the same code by text, the same bits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering

from q2compile import explain
from q2compile.errors import NotTakenError

pytestmark = pytest.mark.usefixtures("fresh_compiler")
T, K = 32, 64


class Of(nn.Module):
    """A linear layer, and an op that one of our passes or settings changed in earlier versions."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(K, K)
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def order(x: Tensor, copies: int) -> Tensor:
    """A permutation that the graph computes, of `copies` times the rows of x."""
    return torch.argsort(x.detach().sum(1).repeat(copies))


def sorted_tokens(m: Any, x: Tensor) -> Tensor:
    """gather_scattered: rows of a mixture of experts. In bf16 this pass rounds sums differently."""
    return m.linear(x)[order(x, 4) // 4].sin()


def put_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    return torch.zeros_like(y).index_put((order(x, 1),), y)


def short_sum(count: int) -> Callable[[Any, Tensor], Tensor]:
    """short_sums_unrolled: Inductor makes a loop for 8 elements and more."""
    return lambda m, x: m.linear(x)[torch.arange(T * count) % T].view(T, count, K).sum(1)


def rotary(m: Any, x: Tensor) -> Tensor:
    """tabulate: sines that many elements share."""
    angles = torch.outer(torch.arange(T).float(), torch.arange(K // 2).float()).repeat(1, 2)
    y = m.linear(x).expand(8, T, K)
    return y * angles.cos() + y.roll(K // 2, -1) * angles.sin()


def masked_rows(m: Any, x: Tensor) -> Tensor:
    """recompute_mask."""
    return F.gelu(m.linear(x).masked_fill(x[:, :1] > 1, 0.0))


def attention(m: Any, x: Tensor) -> Tensor:
    """inline_attention: one node of Dynamo's graph is two linears for the rewrite."""
    return m.attention(*(m.linear(x)[None],) * 3, need_weights=False)[0]


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: m.linear(x).relu(), x, use_reentrant=False)


PATTERNS = (sorted_tokens, put_in_place, short_sum(8), short_sum(10), rotary, masked_rows)


def all_patterns(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Each of them apart, of the same x. A pass that changes one changes the code."""
    return tuple(pattern(m, x) for pattern in PATTERNS)


MODELS: dict[str, Callable[[], Of]] = {
    "all_patterns": lambda: Of(all_patterns),
    "sorted_tokens": lambda: Of(sorted_tokens),
    "sum_of_10": lambda: Of(short_sum(10)),
    "attention": lambda: Of(attention, attention=nn.MultiheadAttention(K, 2, batch_first=True)),
    "checkpointed": lambda: Of(checkpointed),
}


@pytest.fixture
def sources(monkeypatch) -> list[str]:
    """The code that Inductor generates, without the numbers of graphs and the paths of files."""
    found: list[str] = []

    def save(source: str) -> None:
        found.append(re.sub(r"kernel path: .*|AOT ID: .*|\d+(?=_(forward|backward))", "", source))

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(save))
    return found


def run(name: str, train: bool, **how: Any) -> list[Tensor]:
    """The results of a call, and with `train` the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    x = torch.randn(T, K).bfloat16().requires_grad_(train)
    with inductor_config.patch(fx_graph_cache=False), torch.set_grad_enabled(train):
        y = torch.compile(model, **how)(x)
    results = [y] if isinstance(y, Tensor) else list(y)
    if not train:
        return results
    sum(y.float().square().sum() for y in results).backward()  # type: ignore[union-attr]
    return [*results, x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def ours(**options: Any) -> dict[str, Any]:
    return {"backend": "quartet2", "options": options}


# Passes run on a forward of training and of inference alike; what differs, the compiler of a graph
# without a backward, is the same for all models.
@pytest.mark.parametrize(
    "name, train",
    [
        *((name, True) for name in ("all_patterns", "attention", "checkpointed")),
        ("sum_of_10", False),
    ],
)
def test_code_and_bits_are_inductors(name, train, sources) -> None:
    want = run(name, train, backend="inductor")
    code = list(sources)
    sources.clear()
    got = run(name, train, **ours(recipe="bf16"))
    assert sources == code and len(code) == 1 + train
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


ALIKE = {
    "policy": ours(policy={"*": "bf16"}),
    "telemetry": ours(recipe="bf16", telemetry={"every": 1, "to": os.devnull}),
    "cache_weights": ours(recipe="bf16", cache_weights=True),
    "on_error": ours(recipe="bf16", on_error="bf16"),
    "keep_packed": ours(recipe="bf16", keep_packed=True),
}


def test_whatever_the_options_are(sources) -> None:
    run("sorted_tokens", True, backend="inductor")
    code = list(sources)
    for name, how in ALIKE.items():
        sources.clear()
        run("sorted_tokens", True, **how)
        assert sources == code, name


def test_inductors_own_options_reach_it(sources) -> None:
    for how in ({"options": {"unroll_reductions_threshold": 12}}, {}):
        sources.clear()
        run("sum_of_10", False, backend="inductor", **how)
        code = list(sources)
        sources.clear()
        settings = how.get("options", {})
        run("sum_of_10", False, **ours(recipe="bf16", inductor=settings))
        assert sources == code


def test_without_inductor() -> None:
    """inner="eager" runs the graph that came, too: eager's own bits."""
    torch.manual_seed(0)
    model = MODELS["sorted_tokens"]().bfloat16()
    x = torch.randn(T, K).bfloat16()
    with torch.no_grad():
        want = model(x)
        got = torch.compile(model, **ours(recipe="bf16", inner="eager"))(x)
    assert torch.equal(got, want)


def test_reports_list_what_was_left(tmp_path) -> None:
    torch.compile(Of(masked_rows), **ours(recipe="bf16", dump=str(tmp_path)))(torch.randn(T, K))
    (row,) = json.loads((tmp_path / "report.json").read_text())
    assert row["module"] == "linear" and not row["taken"] and row["recipe"] == "bf16"
    folder = tmp_path / "graph_0"
    texts = [(folder / f"{stage}.txt").read_text() for stage in ("0_dynamo", "1_rewritten")]
    assert "q2." not in texts[1] and texts[0].count("linear") == texts[1].count("linear")
    report = explain(Of(masked_rows), torch.randn(T, K), options={"recipe": "bf16"})
    assert [row.taken for row in report.rows] == [False]


def test_strict_still_refuses() -> None:
    model = nn.Sequential(nn.Linear(8, 8))  # too small to be taken
    with pytest.raises(NotTakenError, match="not taken"):
        torch.compile(model, **ours(strict=True))(torch.randn(T, 8))


def test_an_error_of_inductor_is_inductors(monkeypatch) -> None:
    """It is not reported as a failed stage of q2compile, and the graph is not compiled twice."""
    calls = []

    def fail(self: Any, *args: Any) -> Any:
        calls.append(self)
        raise ZeroDivisionError("as torch says it")

    monkeypatch.setattr(GraphLowering, "run", fail)
    messages = []
    for how in ({"backend": "inductor"}, ours(recipe="bf16"), ours(recipe="bf16", on_error="bf16")):
        calls.clear()
        with pytest.raises(Exception, match="as torch says it") as raised:
            run("sum_of_10", False, **how)
        assert len(calls) == 1
        messages.append((type(raised.value), str(raised.value).replace("quartet2", "inductor")))
    assert messages[0] == messages[1] == messages[2]
