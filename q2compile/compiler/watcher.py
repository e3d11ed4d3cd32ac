# SPDX-License-Identifier: Apache-2.0
"""Observers that are notified as a graph passes through the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx

from q2compile.passes.record import PassRecord


class Watcher(Protocol):
    """An observer. kind: "forward" or "backward". Graphs must not be kept, since they change."""

    def graph(self, stage: str, gm: fx.GraphModule) -> None:
        """A graph at a stage, by the name that its dump has."""

    def weights_chosen(self, why: Mapping[str, str]) -> None:
        """Why the codes of a weight are saved or recomputed, keyed by the node of the forward graph
        that makes them. Called before the graph is."""

    def before_passes(self, gm: fx.GraphModule, kind: str) -> None: ...

    def after_passes(self, gm: fx.GraphModule, kind: str, records: list[PassRecord]) -> None:
        """records: those of all passes so far over the graphs of one Dynamo graph."""

    def output_code(self, gm: fx.GraphModule, source: str) -> None:
        """The code that Inductor generated for a graph."""
