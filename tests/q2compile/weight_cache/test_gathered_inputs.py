# SPDX-License-Identifier: Apache-2.0
"""Graphs with gathered codes, without FSDP2; whole runs are in end_to_end/distributed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx, nn

from q2compile.compiler import compile_graph as module
from q2compile.config import Config, uses_cuda_graphs
from q2compile.weight_cache.gathered_inputs import GatheredInputs


class _Gathered(GatheredInputs):
    """One weight, which the graph does not name."""

    def __init__(self, why: str) -> None:
        self.weights: dict[int, Any] = {0: SimpleNamespace(name="up.weight")}
        self.why = {0: why}

    def take_codes(self, gm: Any, example_inputs: Any) -> Any:
        return gm, example_inputs, []

    def with_codes(self, compiled: Any, *args: Any) -> Any:
        return compiled


@pytest.mark.parametrize(
    ("mode", "options"),
    [("reduce-overhead", None), (None, {"inductor": {"triton.cudagraphs": True}})],
)
@pytest.mark.parametrize("why", ["", "fprop is in bf16"])
def test_a_graph_that_takes_codes_has_no_cuda_graph(monkeypatch, mode, options, why) -> None:
    settings: list[bool] = []

    def compiled(gm: Any, inputs: Any, given: dict[str, Any], *others: Any) -> Any:
        settings.append(given["triton.cudagraphs"])
        return gm

    monkeypatch.setattr(module, "inductor_compile", compiled)
    graph = fx.Graph()
    graph.output(())
    config = Config.from_options(options, mode)
    assert uses_cuda_graphs(config)
    gm = fx.GraphModule(nn.Module(), graph)
    module.compile_graph(gm, [], config, None, gathered=_Gathered(why))
    assert settings == [bool(why)]


@pytest.mark.parametrize(
    ("why", "cuda_graphs", "note"),
    [
        ("", False, "gathers codes"),
        ("", True, "gathers codes, without CUDA graphs"),
        ("it is fp16", True, "gathers values: it is fp16"),
    ],
)
def test_the_report_says_so(why: str, cuda_graphs: bool, note: str) -> None:
    rows: Any = [SimpleNamespace(module=name, taken=True, gathered="") for name in ("up", "down")]
    _Gathered(why).note_gathered(rows, cuda_graphs)
    assert [row.gathered for row in rows] == [note, ""]
