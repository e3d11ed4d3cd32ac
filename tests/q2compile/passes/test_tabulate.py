# SPDX-License-Identifier: Apache-2.0
"""Tables of sines and cosines: which of them are stored, and Inductor's code for them."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.utils._pytree import tree_leaves

from q2compile.passes.post_grad.tabulate import tabulate_pass
from q2compile.torch_internals.inductor import in_memory
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.graph_builder import SOURCE, Builder

aten = torch.ops.aten
FP32 = torch.float32


def graph_of(heads: int, dtype: torch.dtype = FP32, quantized: bool = True) -> Builder:
    """q times the cosine of angles, as HF's RoPE has it, and something quantized."""
    build = Builder()
    angles = build.placeholder("angles", 1, 16, 32, dtype=dtype)
    q = build.placeholder("q", 2, heads, 16, 32)
    cos = build.call(aten.mul.Tensor, build.call(aten.cos.default, angles), 1.0)
    narrow = build.call(aten._to_copy.default, cos)
    spread = build.call(aten.unsqueeze.default, narrow, 1)
    outputs = [build.call(aten.mul.Tensor, q, spread)]
    if quantized:
        x = build.placeholder("x", 64, 64)
        outputs.append(build.call(calls.plain(x, None, None, SOURCE, 0)))
    build.done(*outputs)
    return build


def test_a_table_is_put_into_memory_behind_all_of_its_size() -> None:
    build = graph_of(heads=4)
    assert tabulate_pass(build.graph) == 1
    (table,) = build.graph.find_nodes(op="call_function", target=in_memory())
    (scaled, strides), (reader,) = table.args, table.users
    assert scaled.target is aten.mul.Tensor and strides == (512, 32, 1)
    assert reader.target is aten._to_copy.default and list(scaled.users) == [table]
    assert tabulate_pass(graph_of(heads=3).graph) == 0  # read 6 times


@pytest.mark.parametrize(
    "build",
    [graph_of(4, torch.bfloat16), graph_of(4, quantized=False)],
    ids=["of bf16, which memory would round", "nothing is quantized"],
)
def test_what_is_left(build) -> None:
    assert tabulate_pass(build.graph) == 0


class Rotated(nn.Module):
    """A projection, then RoPE with angles computed from positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.register_buffer("frequencies", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        q = self.q(x).unflatten(-1, (2, 32))
        first, second = q.chunk(2, -1)
        return q * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.usefixtures("fresh_compiler")
def test_each_is_computed_once(monkeypatch) -> None:
    """In the generated code of forward and backward; the kernel that reads the tables has none."""
    found = {}
    for disabled in ([], ["tabulate"]):
        with monkeypatch.context() as patch, inductor_config.patch(INDUCTOR_OPTIONS):
            sources = emulate(patch, 90)
            serve_as_on(patch, 90)
            torch._dynamo.reset()
            options = {"disable_passes": disabled, "fuse_rotations": False}
            model = torch.compile(Rotated(), backend="quartet2", options=options)
            model(torch.zeros(8, 64, 64, dtype=torch.bfloat16)).sum().backward()
        kernels = [k for s in sources for k in s.split("async_compile.triton(")[1:]]
        found[not disabled] = [
            ("tl_math.cos" in k or "tl_math.sin" in k, "in_ptr2" in k) for k in kernels
        ]
    assert (True, True) not in found[True] and found[True].count((True, False)) >= 2
    assert (True, True) in found[False]


@pytest.mark.usefixtures("fresh_compiler")
def test_the_numbers_stay(monkeypatch) -> None:
    results = []
    for disabled in ([], ["tabulate"]):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Rotated()
        options = {"disable_passes": disabled}
        compiled = torch.compile(model, backend="quartet2", options=options)
        x = torch.randn(8, 64, 64).bfloat16().requires_grad_()
        y = compiled(x)
        y.backward(torch.ones_like(y))
        results.append([y, x.grad, model.q.weight.grad])
    assert all(map(torch.equal, *map(tree_leaves, results)))
