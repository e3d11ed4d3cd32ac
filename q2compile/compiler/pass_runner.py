# SPDX-License-Identifier: Apache-2.0
"""Runs the rows of the pass table, for joint and post-grad graphs alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import fx

from q2compile import passes
from q2compile.compiler.cache_key import source_hash
from q2compile.config import Config
from q2compile.errors import BackendError
from q2compile.graph.nodes import op_counts
from q2compile.passes.record import PassRecord
from q2compile.runtime_kernels.check_results import rejections
from q2compile.runtime_kernels.kernel_states import disabled_kernels
from q2compile.torch_internals.dynamo import copied, noted
from q2compile.torch_internals.inductor import CustomGraphPass

Fault = Callable[[str, str, fx.GraphModule, Exception], Exception]


class PassRunner(CustomGraphPass):
    """All passes of one kind of graph, in one slot of Inductor.

    kind     of graphs, as in the table
    config   names the passes to leave out, and decides which are wanted
    records  where a PassRecord of each pass and graph goes, zero matches included
    first    a pass that was in Inductor's slot before; it runs first
    fault    called when a pass or a check raises, with (what did, kind, the graph as it came, the
             error); its result is raised
    running  the pass that runs now, in words
    """

    kind: passes.Kind

    def __init__(
        self,
        config: Config,
        records: list[PassRecord],
        first: Any = None,
        fault: Fault | None = None,
    ) -> None:
        self.config = config
        self.records = records
        self.first = first
        self.fault = fault
        self.running = ""

    def run(self, graph: fx.Graph, kind: str) -> None:
        """Run the passes over a "joint", "forward" or "backward" graph, in place."""
        if self.fault is None:
            self._run(graph, kind)
            return
        came = noted(graph)
        try:
            self._run(graph, kind)
        except BackendError:
            raise
        except Exception as error:
            raise self.fault(self.running, kind, copied(module_of(graph), came()), error) from error

    def _run(self, graph: fx.Graph, kind: str) -> None:
        raise NotImplementedError

    def wanted(self, graph: fx.Graph) -> passes.PassConditions:
        """The facts that decide which passes this graph gets."""
        raise NotImplementedError

    def run_passes(self, graph: fx.Graph, label: str) -> None:
        """Run the wanted passes over a graph, in place. label: the graph's name in records."""
        wanted = self.wanted(graph)
        before = op_counts(graph)
        for row in passes.passes_over(self.kind):
            if not row.when(wanted):
                continue
            if row.name in self.config.disable_passes:
                self.records.append(PassRecord(label, row.name, 0, 0.0, note="disabled"))
                continue
            self.running = f"pass {row.name!r}"
            start = time.perf_counter()
            matches = row.run(graph, *row.takes(wanted))
            seconds = time.perf_counter() - start
            after = op_counts(graph)
            change = {op: after[op] - before[op] for op in sorted({*before, *after})}
            changed = {op: n for op, n in change.items() if n}
            details = row.notes(graph)
            record = PassRecord(label, row.name, matches, seconds, changed, details=details)
            self.records.append(record)
            before = after

    def key(self) -> str:
        """The part of Inductor's cache key for options that change this kind of graph."""
        raise NotImplementedError

    def uuid(self) -> Any:
        """Part of Inductor's cache key: our sources, the kernels that are disabled or rejected, and
        `key`. Without the sources, a cache hit after an edit of a pass would be stale. None turns
        the cache off: a pass that runs first has no uuid."""
        left_out = ",".join((*disabled_kernels(), *rejections()))
        own = f"{source_hash()}:{left_out}:{self.key()}"
        if self.first is None:
            return own
        other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if other is None else (own, other)


def module_of(graph: fx.Graph) -> fx.GraphModule:
    gm = graph.owning_module
    assert gm is not None
    return gm
