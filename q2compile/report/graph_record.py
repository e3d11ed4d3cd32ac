# SPDX-License-Identifier: Apache-2.0
"""One graph's stages as named texts: the files of its dump, or the same in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from q2compile.passes.record import PassRecord
from q2compile.report.graph_text import lines_of, readable
from q2compile.torch_internals.dynamo import called_graphs
from q2compile.torch_internals.node_origin import Frame, dynamo_name, stack_of

Write = Callable[[str, str], None]


class GraphRecord:
    """The files of one graph.

    number   of the graph, in rows
    write    called with a file's name and its text, again when the text has grown
    """

    def __init__(self, number: int, write: Write) -> None:
        self.number = number
        self._write = write
        self._written: dict[str, WeakKeyDictionary[fx.GraphModule, list[str]]] = {}
        self._origins = _Origins()

    def write_graph(self, stage: str, gm: fx.GraphModule) -> None:
        """A graph and those that it calls. One that has been written alone at this stage, as the
        passes see them, those that are called first, is shown as it was then.
        """
        written = self._written.setdefault(stage, WeakKeyDictionary())
        self._write(f"{stage}.txt", readable(gm, written))
        written[gm] = lines_of(gm.graph)
        self._origins.add(stage, gm)
        self._write("nodes.json", self._origins.text())

    def note_saved(self, saved: list[Any]) -> None:
        """The tensors that the backward takes from the forward, to be written with the next
        graph."""
        self._origins.saved = saved

    def write_code(self, stage: str, source: str) -> None:
        self._write(f"{stage}.py", source)

    def write_passes(self, records: list[PassRecord]) -> None:
        text = json.dumps([asdict(r) for r in records], indent=1)
        self._write("passes.json", text + "\n")


@dataclass
class _Origins:
    """Where the nodes of all stages come from, each frame and each stack written once: what
    nodes.json holds.

    frames  [file, line, function, code]
    stacks  lists of places in frames, outermost first
    stages  stage -> node's name -> [place in stacks or -1, the node of Dynamo's graph or ""]
    saved   what `saved_for_backward.described` says of each tensor that the backward takes from
            the forward; null before there is a backward
    """

    frames: dict[Frame, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    stages: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    saved: list[Any] | None = None

    def add(self, stage: str, gm: fx.GraphModule) -> None:
        """Add nodes of ``gm`` and the graphs it calls; of two with one name, ``gm``'s counts."""
        nodes = self.stages.setdefault(stage, {})
        for graph in called_graphs(gm):
            for node in graph.graph.nodes:
                if node.op not in ("placeholder", "output"):
                    nodes[node.name] = (self._stack(stack_of(node)), dynamo_name(node))

    def _stack(self, frames: tuple[Frame, ...]) -> int:
        if not frames:
            return -1
        places = tuple(self.frames.setdefault(f, len(self.frames)) for f in frames)
        return self.stacks.setdefault(places, len(self.stacks))

    def text(self) -> str:
        shown: dict[str, Any] = {
            "frames": list(self.frames),
            "stacks": list(self.stacks),
            "stages": self.stages,
            "saved": self.saved,
        }
        return json.dumps(shown, separators=(",", ":")) + "\n"
