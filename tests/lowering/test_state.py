# SPDX-License-Identifier: Apache-2.0
"""The state that the lowerings of one graph share: its graph and its lifetime."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn

from q2compile.lowering import state
from q2compile.lowering.state import LoweringState, lowering_state
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on


@pytest.mark.usefixtures("fresh_compiler")
def test_each_graph_has_one_and_takes_it_along(monkeypatch) -> None:
    """Forward and backward of two layers; of neither anything is left once they are compiled."""
    made: list[int] = []

    class Counted(LoweringState):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            made.append(len(made))

    emulate(monkeypatch, 90)
    serve_as_on(monkeypatch, 90)
    monkeypatch.setattr(state, "LoweringState", Counted)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    x = torch.zeros(128, 64, dtype=torch.bfloat16, requires_grad=True)
    with inductor_config.patch(INDUCTOR_OPTIONS):
        torch.compile(model, backend="quartet2")(x).sum().backward()
    assert len(made) == 2
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Counted]


def test_work_is_done_once(monkeypatch) -> None:
    class Graph:
        module = fx.GraphModule(nn.Module(), fx.Graph())

    done: list[str] = []
    graphs = Graph(), Graph()
    for graph in (*graphs, *graphs):
        monkeypatch.setattr(state, "V", type("V", (), {"graph": graph}))
        assert lowering_state().once("key", lambda: done.append("work") or len(done)) in (1, 2)
    assert len(done) == 2
