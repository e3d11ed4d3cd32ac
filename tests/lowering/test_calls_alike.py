# SPDX-License-Identifier: Apache-2.0
"""Equal calls: how often the registry is asked, and that its cached answers change no generated
code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn

from q2compile.lowering import launches
from q2compile.lowering.prologue import fusion_rule
from q2compile.lowering.state import LoweringState
from q2compile.runtime_kernels.cuda.quantize.grouped_check import GROUP
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

pytestmark = pytest.mark.usefixtures("fresh_compiler")
WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


@pytest.fixture
def sources(monkeypatch) -> list[str]:
    """The code generated for an H200 that is not there."""
    found = emulate(monkeypatch, 90)
    serve_as_on(monkeypatch, 90)
    return found


def compile_layers(count: int, dynamic: bool = False, **options: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(count)))
    x = torch.zeros(256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with inductor_config.patch(INDUCTOR_OPTIONS):
        compiled = torch.compile(model, backend="quartet2", dynamic=dynamic, options=options)
        compiled(x).sum().backward()


def generated(sources: list[str]) -> list[str]:
    """The sources so far, without the number of the graph in the process and the places of files;
    and none from here on."""
    found = [
        re.sub(r"kernel path: .*|AOT ID: .*|\d+(?=_(forward|backward))", "", s) for s in sources
    ]
    sources.clear()
    return found


def test_code_is_that_without_it(sources, monkeypatch) -> None:
    """With sizes that are expressions."""
    compile_layers(2, dynamic=True)
    with_it = generated(sources)
    monkeypatch.setattr(LoweringState, "once", lambda state, key, work: work())
    compile_layers(2, dynamic=True)
    assert len(with_it) == 2 and with_it == generated(sources)


def kind_of(arg: Any) -> Any:
    """Calls of equal layers differ in values and random bits alone."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.shape, arg.stride()
    return type(arg) if type(arg) is int else arg


@pytest.mark.parametrize("fuse", [False, True])
def test_equal_layers_have_equal_calls(fuse, sources, monkeypatch) -> None:
    """Kernels are looked up once for each kind of call in a graph, so the second layer asks for
    nothing that the first has asked for. Only grouped launches are asked for again: `choose`
    remembers them."""
    monkeypatch.setattr(fusion_rule, "why_not", lambda *args: None)
    asked: Counter[Any] = Counter()
    choose = launches.choose

    def counted(op: str, args: Any) -> Any:
        if op != GROUP:
            asked[(len(sources), op, *map(kind_of, args))] += 1
        return choose(op, args)

    monkeypatch.setattr(launches, "choose", counted)
    compile_layers(2, fuse_rotations=fuse)
    assert fuse == any("q2_fused_1" in source for source in sources)
    assert max(asked.values()) == 1, asked
    assert sum(op == "requantize" for _, op, *_ in asked) == 2  # of x and of w


def test_equal_called_ops_have_one_fake(monkeypatch) -> None:
    """On a CPU the ops are called. Two layers need no fakes that one does not need."""
    made: list[str] = []
    call_op = launches.call_op
    monkeypatch.setattr(launches, "call_op", lambda op, args: made.append(op) or call_op(op, args))
    counts = []
    for layers in (1, 2):
        compile_on_cpu(layers)
        counts.append(Counter(made))
        made.clear()
    assert counts[0] == counts[1]
    assert counts[0] == {"quantize": 3, "gemm": 3, "requantize": 2}


def compile_on_cpu(count: int) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(Layer() for _ in range(count)))
    x = torch.zeros(256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(model, backend="quartet2")(x).sum().backward()
