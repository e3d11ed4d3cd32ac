"""The Dynamo backend ``quartet2``: capture → rewrite → Inductor, for one graph at a time.

Registered by the entry point group ``torch_dynamo_backends``, so ``torch.compile(model,
backend="quartet2")`` needs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from q2compile import compat
from q2compile.attention import inline_attention
from q2compile.config import Config
from q2compile.coverage import Coverage
from q2compile.dump import DumpFolder, GraphDump
from q2compile.errors import BackendError, NotTakenError, StageError
from q2compile.faults import COMPILE, REWRITE, Faults, copied, warn
from q2compile.kernels_used import kernels_used
from q2compile.names import Names, site_name
from q2compile.passes.joint import JointPasses
from q2compile.passes.manager import PassManager
from q2compile.report import Report, Row, collector
from q2compile.rewrite import rewrite
from q2compile.saved import count_saved


def quartet2(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Config | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with its linear layers quantised as ``options`` say (see `Config`).

    Raises ValueError for options that can't be used as given, and for a policy that this graph
    can't keep; under ``strict`` RuntimeError for a matmul that the policy wanted and that was not
    taken; under ``on_error="raise"`` StageError, a RuntimeError too, when a stage fails.
    """
    config = Config.from_options(options, mode)
    names = Names.of_graph(gm)
    compilation = _Compilation(config, Coverage.of(names.root, config), names)
    original = copied(gm)
    stage = REWRITE
    try:
        _rewritten(gm, compilation)
        stage = COMPILE
        compiled = compilation.compile(gm, example_inputs)
    except compat.control_flow():  # Dynamo will come again with another graph
        compilation.forget()
        raise
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # Inductor wraps what a pass raises
        if isinstance(error, BackendError) and not isinstance(error, StageError):
            raise  # the user's to mend
        if isinstance(error, StageError):
            fault, cause = error, error.__cause__
        else:
            fault, cause = compilation.faults.of_stage(stage, original, error), error
        if config.on_error == "raise":
            raise fault from cause
        warn(fault)
        compilation.leave_all(fault)
        return compilation.compile_plain(original, example_inputs)
    return compilation.coverage.check_in_first_backward(compiled) if config.strict else compiled


def _rewritten(gm: fx.GraphModule, compilation: _Compilation) -> None:
    """Rewrite ``gm`` in place, with what dump and report want to see of it."""
    config, names, coverage = compilation.config, compilation.names, compilation.coverage
    compilation.dump_graph("0_dynamo", gm)
    inline_attention(gm)
    rows = rewrite(gm, config, names)
    compilation.dump_graph("1_rewritten", gm)
    coverage.add(rows, names)
    compilation.add_rows(rows)
    if config.strict:
        coverage.refuse_unmatched_patterns()
        _refuse_not_taken(rows)


def _refuse_not_taken(rows: list[Row]) -> None:
    missed = [r for r in rows if r.wanted and not r.taken]
    if missed:
        listed = "; ".join(f"{r.module}: {r.why}" for r in missed)
        raise NotTakenError(
            f"strict: {len(missed)} matmul(s) with a weight were not taken: {listed}. "
            "Give them 'bf16' in the policy if that is meant, or set strict=False"
        )


def _kernels(row: Row, config: Config) -> dict[str, str]:
    # A size that data decide, such as an expert's tokens, has no hint: one chunk then.
    shape = tuple(size if isinstance(size, int) else size.node.hint or 128 for size in row.shape)
    gemms = (row.fprop, row.dgrad, row.wgrad)
    lowers = config.inner == "inductor"
    return kernels_used(gemms, shape, getattr(torch, row.dtype), row.device, lowers)


def _graph_name(names: Names) -> str:
    root = type(names.root).__name__ if names.root is not None else "a function"
    return f"graph {compat.compile_id()} of {root}" + (f", {names.prefix}" if names.prefix else "")


class _Compilation:
    """One graph on its way through Inductor, with those who watch: the dump and the report."""

    def __init__(self, config: Config, coverage: Coverage, names: Names) -> None:
        self.config = config
        self.coverage = coverage
        self.names = names
        self.rows: list[Row] = []
        self.dump: GraphDump | None = None
        self.reports: list[tuple[Report, DumpFolder | None]] = []
        if config.dump is not None:
            folder = DumpFolder.get(config.dump)
            self.dump = folder.new_graph()
            self.reports.append((folder.report, folder))
        collecting = collector.get()
        if collecting is not None:
            self.reports.append((collecting, None))
        path = self.dump.path if self.dump else None
        self.faults = Faults(config, _graph_name(names), path, names.by_id)
        self.manager = PassManager(
            config,
            self._observe if self.watched else None,
            compat.pass_in_slot(),
            self.faults.of_pass,
        )

    @property
    def watched(self) -> bool:
        return bool(self.reports)

    def dump_graph(self, stage: str, gm: fx.GraphModule) -> None:
        if self.dump is not None:
            self.dump.write_graph(stage, gm)

    def add_rows(self, rows: list[Row]) -> None:
        for report, _ in self.reports:
            number = self.dump.number if self.dump else report.graphs
            for row in rows:
                row.graph = number
                if row.taken:
                    row.kernels = _kernels(row, self.config)
            report.add(rows, self.coverage)
        self.rows = rows
        self._write_reports()

    def forget(self) -> None:
        """Take back what the reports were told of this graph."""
        for report, _ in self.reports:
            report.remove(self.rows)

    def leave_all(self, fault: StageError) -> None:
        """The report of a graph that is compiled by Inductor alone after all."""
        why = f"on_error='bf16': {fault.stage} failed"
        for row in self.rows:
            if row.taken:
                row.taken, row.kernels, row.saved_bytes, row.saved_elements = False, {}, None, None
                row.recipe = row.fprop = row.dgrad = row.wgrad = "bf16"
                row.why = why
        if not self.rows:  # not even found
            by_id = self.names.by_id
            rows = [
                Row(site_name(by_id[id(p)][0]), tuple(p.shape), why=why, wanted=True)
                for p in self.names.held
                if p.ndim >= 2 and id(p) in by_id
            ]
            self.coverage.add(rows, self.names)
            self.add_rows(rows)
        for report, _ in self.reports:
            report.faults.append(" ".join(str(fault).split()))
        self._write_reports()

    def _write_reports(self) -> None:
        for _, folder in self.reports:
            if folder is not None:
                folder.write_report()

    def _observe(self, graph: fx.Graph, kind: str, when: str) -> None:
        gm = graph.owning_module
        assert gm is not None
        if when == "before":
            if kind == "forward":
                count_saved(graph, self.rows)
                self._write_reports()
            self.dump_graph("2_forward" if kind == "forward" else "3_backward", gm)
        else:
            self.dump_graph(f"4_after_passes_{kind}", gm)
            if self.dump is not None:
                self.dump.write_passes(self.manager.records)

    def _output_code(self, gm: fx.GraphModule, source: str) -> None:
        if self.dump is not None:
            self.dump.write_code(f"5_output_code_{compat.graph_kind(gm.graph)}", source)

    def compile(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile the rewritten graph; the backward too when a failure there still counts."""
        with compat.backward_at_once(self.config.on_error == "bf16"):
            return self._compile(gm, example_inputs)

    def compile_plain(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile Dynamo's graph as it came, without q2compile."""
        if self.config.inner == "eager":
            return compat.aot_eager_compile(gm, example_inputs, lambda g: None)
        return compat.inductor_compile(gm, example_inputs, self._patches())

    def _patches(self) -> dict[str, Any]:
        return {**compat.inductor_options_of_mode(self.config.mode), **self.config.inductor}

    def _compile(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if not self.config.cache_weights:
            return self._compile_graph(gm, example_inputs)
        from q2compile.weight_cache import take_codes, with_codes

        gm, inputs, sites = take_codes(gm, example_inputs, self.names.root)
        self.dump_graph("1_rewritten", gm)
        return with_codes(self._compile_graph(gm, inputs), sites, self._compile_form)

    def _compile_form(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """What makes a weight's codes. What it returns is kept, so not in a CUDA graph's memory."""
        manager = PassManager(self.config)
        if self.config.inner == "eager":
            return compat.aot_eager_compile(gm, inputs, lambda g: manager(g.graph))
        patches = {**self._patches(), **compat.pass_slot(manager), "triton.cudagraphs": False}
        return compat.inductor_compile(gm, inputs, patches)

    def _compile_graph(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        first = compat.pass_in_slot(compat.JOINT_PASS_SLOT)
        joint = JointPasses(self.config, self.manager.records, first)
        if self.config.inner == "eager":
            return compat.aot_eager_compile(
                gm, example_inputs, lambda g: self.manager(g.graph), joint
            )
        patches = {**self._patches(), **compat.pass_slot(self.manager)}
        if joint.names:
            patches[compat.JOINT_PASS_SLOT] = joint
        if self.watched:  # a cache hit would skip the passes, and with them what is to be shown
            patches["fx_graph_cache"] = False
            return compat.inductor_compile(gm, example_inputs, patches, self._output_code)
        return compat.inductor_compile(gm, example_inputs, patches)
