# SPDX-License-Identifier: Apache-2.0
"""The log of one Dynamo graph: its dump, its reports, and the checks of `strict`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from q2compile.capture.module_names import Names, site_name
from q2compile.config import Config
from q2compile.errors import NotTakenError, StageError
from q2compile.graph.node_meta import GATHERS
from q2compile.passes.record import PassRecord
from q2compile.report import announce, compiled_options, expect
from q2compile.report.dump_folder import DumpFolder
from q2compile.report.graph_record import GraphRecord
from q2compile.report.graph_text import readable
from q2compile.report.kernel_choice import set_kernels
from q2compile.report.model_coverage import Coverage
from q2compile.report.report import RunReport, collector, table
from q2compile.report.row import Row
from q2compile.report.saved_for_backward import count_saved, described, note_weights
from q2compile.torch_internals.aot_autograd import compiles_ahead_of_time, graph_kind
from q2compile.torch_internals.dynamo import compile_id
from q2compile.torch_internals.trace import is_traced, trace_artifact


class GraphLog:
    """Told of one graph's stages, in order, by the backend and the compiler (`compiler.watcher`).
    It lives as long as compiled code whose backward may still come, so it holds no `Names`, and
    with them the model.

    title    how to call the graph: "graph 0/0 of Llama"
    folder   of its dump; None without the option
    watcher  the log itself if anybody reads it; None if there is no dump, report, trace or log at
             level DEBUG
    """

    def __init__(self, config: Config, names: Names) -> None:
        self._config = config
        self._rows: list[Row] = []
        self._weights: dict[str, str] = {}
        self._records: list[GraphRecord] = []
        self._passes: list[PassRecord] = []
        self._made: dict[str, list[Any]] = {}  # by the forward
        self.folder: Path | None = None
        self._reports: list[RunReport] = []
        if config.dump is not None:
            folder = DumpFolder.get(os.fspath(config.dump))
            self.folder, record = folder.new_graph()
            self._records.append(record)
            self._reports.append(folder.report)
        collecting = collector.get()
        apart = None if collecting is None else collecting.by_root
        self._coverage = Coverage.of(names.root, config, names.label, apart)
        if collecting is not None:
            number = self._records[0].number if self._records else collecting.graphs
            self._records.append(collecting.new_graph(number))
            self._reports.append(collecting)
        root = type(names.root).__name__ if names.root is not None else "a function"
        self.title = f"graph {compile_id()} of {root}" + (f", {names.place}" * bool(names.place))
        heard = announce.LOG.isEnabledFor(logging.DEBUG) or is_traced()
        self.watcher = self if self._reports or heard else None

    def graph(self, stage: str, gm: fx.GraphModule) -> None:
        """Dump a graph at a stage under that name."""
        for record in self._records:
            record.write_graph(stage, gm)
        trace_artifact(f"q2compile_{stage}", lambda: readable(gm))

    def rewritten(self, stage: str, gm: fx.GraphModule, rows: list[Row], names: Names) -> None:
        """The rewritten graph, with a row for each of its matmuls. Under ``strict``, raises
        ConfigError for patterns that match nothing, NotTakenError for matmuls that were wanted.
        """
        self.graph(stage, gm)
        self._coverage.add(rows, names)
        self._add(rows)
        announce.compiled(self.title, rows, self._config)
        announce.failed(self.title, rows, names.failure)
        trace_artifact("q2compile_config", lambda: repr(self._config))
        trace_artifact("q2compile_report", lambda: table(rows))
        if self._config.strict:
            self._coverage.raise_on_unmatched_patterns()
            raise_on_missed(rows)
        elif text := self._coverage.says_that_nothing_is_recorded():
            announce.LOG.warning("q2compile: %s", text)

    def weights_chosen(self, why: Mapping[str, str]) -> None:
        self._weights.update(why)

    def before_passes(self, gm: fx.GraphModule, kind: str) -> None:
        if kind == "forward":
            count_saved(gm.graph, self._rows)
            note_weights(gm.graph, self._rows, self._weights, _asked_of_weights(self._config))
            self._write_reports()
            self._made = described(gm.graph) if self._records else {}
        else:
            inputs = (node.name for node in gm.graph.find_nodes(op="placeholder"))
            saved = [self._made[name] for name in inputs if name in self._made]
            for record in self._records:
                record.note_saved(saved)
        self.graph("2_forward" if kind == "forward" else "3_backward", gm)

    def after_passes(self, gm: fx.GraphModule, kind: str, records: list[PassRecord]) -> None:
        if kind == "forward":
            _note_gathered(gm.graph, self._rows)
            self._write_reports()
        self.graph(f"4_after_passes_{kind}", gm)
        for done in records:
            if done.graph == kind:
                announce.passed(self.title, done)
        self._passes = records
        for record in self._records:
            record.write_passes(records)

    def output_code(self, gm: fx.GraphModule, source: str) -> None:
        for record in self._records:
            record.write_code(f"5_output_code_{graph_kind(gm.graph)}", source)
            record.write_passes(self._passes)  # with what lowerings have added

    def checked(self, compiled: Callable[..., Any], names: Names) -> Callable[..., Any]:
        """Notify `expect`; return what was compiled. Under ``strict`` with a check of what never
        came to the backend: now if this graph is all there is and is to be saved, else in the first
        backward.
        """
        if collector.get() is None:  # `explain` compiles for its report alone
            was_taken = any(row.taken for row in self._rows)
            compiled = expect.compiled(compiled, self._rows, names, was_taken=was_taken)
            compiled_options.note(names, self._config)
        if not self._config.strict:
            return compiled
        if compiles_ahead_of_time():
            self._coverage.raise_on_unseen()
            return compiled
        return self._coverage.check_in_first_backward(compiled)

    def forget(self) -> None:
        """Take back what the reports have of this graph."""
        for report in self._reports:
            report.remove(self._rows)

    def left_in_bf16(self, fault: StageError, names: Names) -> None:
        """The graph is compiled by Inductor alone after all."""
        why = f"on_error='bf16': {fault.stage} failed"
        for row in self._rows:
            if row.taken:
                row.taken, row.kernels, row.calls = False, {}, {}
                row.saved_bytes, row.saved_elements, row.rounded = None, None, ""
                row.recipe = row.fprop = row.dgrad = row.wgrad = "bf16"
                row.why = why
        if not self._rows:  # not even found
            by_id = names.by_id
            rows = [
                Row(site_name(by_id[id(p)][0]), tuple(p.shape), why=why, wanted=True)
                for p in names.held
                if p.ndim >= 2 and id(p) in by_id
            ]
            self._coverage.add(rows, names)
            self._add(rows)
        for report in self._reports:
            report.faults.append(" ".join(str(fault).split()))
        self._write_reports()

    def _add(self, rows: list[Row]) -> None:
        for report in self._reports:
            number = self._records[0].number
            for row in rows:
                row.graph = number
                if row.taken:
                    set_kernels(row, self._config)
            report.add(rows, self._coverage)
            report.run.add(self._config)
        self._rows = rows
        self._write_reports()

    def _write_reports(self) -> None:
        for report in self._reports:
            report.on_change()


def _note_gathered(graph: fx.Graph, rows: list[Row]) -> None:
    """Weights that a forward gathers, as pass `quantize_shards` notes it."""
    of_seed_index = {
        s: text for node in graph.nodes for s, text in node.meta.get(GATHERS, {}).items()
    }
    for row in rows:
        if row.taken and row.seed_index in of_seed_index:
            row.gathered = of_seed_index[row.seed_index]


def _asked_of_weights(config: Config) -> str:
    """Why all codes of weights are saved or recomputed, if an option decides; "" if memory does."""
    for name in ("keep_packed", "cache_weights"):
        if getattr(config, name) and config.recompute_weights == "auto":
            return f"{name}=True"
    if "recompute_weights" in config.disable_passes:
        return "disable_passes"
    if config.recompute_weights == "auto":
        return ""
    return f"recompute_weights={config.recompute_weights}"


def raise_on_missed(rows: list[Row]) -> None:
    """Raises NotTakenError for matmuls that the policy wanted and that were not taken."""
    missed = [r for r in rows if r.wanted and not r.taken]
    if missed:
        listed = "; ".join(f"{r.module}: {r.why}" for r in missed)
        raise NotTakenError(
            f"strict: {len(missed)} matmul(s) with a weight were not taken: {listed}. "
            "Give them 'bf16' in the policy if that is meant, or set strict=False"
        )
