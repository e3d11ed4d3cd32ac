# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the front: a compilation that ends with the rewrite."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from q2compile.torch_internals.dynamo import called_graphs


@pytest.fixture
def only_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewritten graphs run as they are. AOTAutograd takes three quarters of the time that a small
    model takes to compile, and it has no influence on names, policies and reasons."""

    def as_it_is(gm: fx.GraphModule, *_: Any) -> fx.GraphModule:
        for graph in called_graphs(gm):
            graph.recompile()
        return gm

    for name in ("compile_graph", "compile_plain"):
        monkeypatch.setattr(f"q2compile.backend.{name}", as_it_is)
