"""Who is told of a graph on its way through the compiler."""

from __future__ import annotations

from typing import Protocol

from torch import fx

from q2compile.passes.record import PassRecord


class Watcher(Protocol):
    """kind: "forward" or "backward". Graphs are shown, not given: they go on to change."""

    def graph(self, stage: str, gm: fx.GraphModule) -> None:
        """A graph at a stage, by the name that its dump has."""

    def before_passes(self, gm: fx.GraphModule, kind: str) -> None: ...

    def after_passes(self, gm: fx.GraphModule, kind: str, records: list[PassRecord]) -> None:
        """records: of all passes so far over the graphs of one Dynamo graph."""

    def output_code(self, gm: fx.GraphModule, source: str) -> None:
        """What Inductor generated for a graph."""
