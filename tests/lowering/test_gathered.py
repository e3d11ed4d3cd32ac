# SPDX-License-Identifier: Apache-2.0
"""Gathered codes, by the code generated for an H200 that is not there: our kernels run on a CPU
(tests/support/emulation), Inductor's in C++."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering

from q2compile.runtime_kernels.cuda.call_site import CallSite
from tests.support.emulation.inductor import lower_on_cpu, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
E, TOP, TOKENS, K, N = 3, 2, 100, 64, 128
ROWS = TOP * TOKENS


class Gated(nn.Module):
    """Two stacks of experts read the same rows; all rows are named, or some, or some are zero."""

    def __init__(self, how: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate, self.up = (
            nn.Parameter(torch.randn(E, N, K, generator=generator).bfloat16()) for _ in range(2)
        )
        self.how = how

    def forward(self, h: Tensor, order: Tensor, offs: Tensor) -> Tensor:
        rows = order.argsort() // TOP
        x = h[rows // 2 - TOKENS if self.how == "some" else rows]
        if self.how == "zero":
            x = x.masked_fill((order >= offs[-1])[:, None], 0)
        a, b = (torch._grouped_mm(x, w.mT, offs=offs) for w in (self.gate, self.up))
        return a + b


def step(how: str, training: bool = True, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    model = Gated(how)
    h = torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(1))
    h[-1] *= 1e3
    h = h.bfloat16().requires_grad_(training)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    offs = torch.tensor([7, 7, ROWS - 10], dtype=torch.int32)
    how_compiled = {**options, "inductor": {"cpp.threads": 1}}
    compiled = torch.compile(model, backend="quartet2", options=how_compiled)
    torch.manual_seed(3)
    with torch.set_grad_enabled(training), inductor_config.patch(fx_graph_cache=False):
        y = compiled(h, order, offs)
        if not training:
            return [y]
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16())
    assert h.grad is not None
    return [y.detach(), h.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def pretended(monkeypatch) -> Iterator[list[str]]:
    """The sources of the graphs that are compiled."""
    enqueue = CallSite.enqueue
    lower_on_cpu(monkeypatch)
    serve_as_on(monkeypatch, 90)
    monkeypatch.setattr(CallSite, "enqueue", enqueue)
    launches_on_cpu(monkeypatch, "sm_90a")
    sources: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    yield sources


@pytest.mark.parametrize(
    "recipe, how", [("quartet2", "all"), ("tetrajet2", "some"), ("quartet", "zero")]
)
def test_the_bits_are_the_reference_s(recipe, how, request) -> None:
    """The bits are those of the ops, without any pass. Dequantized rows are gathered in the forward
    and codes in the backward, once for both stacks; the codes that are saved are those of tokens.
    """
    want = step(how, recipe=recipe, disable_passes=["quantize_rows_once"])
    sources = request.getfixturevalue("pretended")
    got = step(how, recipe=recipe)
    assert all(map(torch.equal, got, want))
    forward, backward = sources
    if recipe != "quartet2":
        return
    assert f"({ROWS}, {K // 2})" not in forward and f"({ROWS}, {K // 16})" not in forward
    assert _made(forward, "torch.bfloat16").count(f"({ROWS}, {K})") == 1
    assert _made(backward, "torch.uint8") == [f"({ROWS}, {K // 16})", f"({ROWS}, {K // 2})"]
    sites = [line for part in backward.split("q2_Call(") for line in part.splitlines()[:1]]
    assert sum(site.startswith("'requantize'") and "offs=" in site for site in sites) == 1


def test_the_bits_of_inference(request) -> None:
    how = "zero"
    want = step(how, training=False, disable_passes=["quantize_rows_once"])
    sources = request.getfixturevalue("pretended")
    assert torch.equal(*step(how, training=False), *want)
    (source,) = sources
    assert f"({ROWS}, {K // 2})" not in source


def _made(source: str, dtype: str) -> list[str]:
    """The sizes of a graph's own buffers of a type, in order."""
    made = rf"= empty_strided_cpu\((\(.*?\)), \(.*?\), {re.escape(dtype)}\)"
    return re.findall(made, source[source.index("def call(") :])
