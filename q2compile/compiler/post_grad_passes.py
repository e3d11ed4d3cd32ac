"""The runner of the post-grad passes: one `CustomGraphPass`, since torch 2.11 takes only one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from q2compile.compat import CustomGraphPass, graph_kind
from q2compile.config import Config
from q2compile.errors import BackendError
from q2compile.faults import copied
from q2compile.passes import PASSES
from q2compile.passes.graphs import op_counts, q2_nodes
from q2compile.passes.spec import check_spec
from q2compile.runtime_kernels.registry import ops, warm_up


@dataclass
class PassRecord:
    """What one pass did to one graph."""

    graph: str
    name: str
    matches: int
    seconds: float
    ops: dict[str, int] = field(default_factory=dict)  # op -> change of its count
    note: str = ""


class PassManager(CustomGraphPass):
    """Runs PASSES over a graph, checking the spec at entry and at exit.

    config     names the passes to leave out
    first      a pass that was in Inductor's slot before us; it runs first
    observe    called with (graph, kind, "before" | "after") for dumps and the report
    fault      called when a pass or a check raises, with (what did, kind, the graph as it came,
               the error); what it returns is raised
    records    a PassRecord for each pass and graph, zero matches included
    """

    def __init__(
        self,
        config: Config,
        observe: Callable[[fx.Graph, str, str], None] | None = None,
        first: Any = None,
        fault: Callable[[str, str, fx.GraphModule, Exception], Exception] | None = None,
    ) -> None:
        self.config = config
        self.first = first
        self.observe = observe
        self.fault = fault
        self.records: list[PassRecord] = []

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        self.run(graph, graph_kind(graph))

    def run(self, graph: fx.Graph, kind: str) -> None:
        """Runs the passes over a "forward" or "backward" graph, in place."""
        if self.fault is None:
            self._run(graph, kind)
            return
        came = copied(graph.owning_module)
        try:
            self._run(graph, kind)
        except BackendError:
            raise
        except Exception as error:
            raise self.fault(self.running, kind, came, error) from error

    def _run(self, graph: fx.Graph, kind: str) -> None:
        random_forward = self.config.resolved_policy.random_forward
        self.running = "the check before the passes"
        check_spec(graph, kind, f"{kind} graph before the passes", random_forward)
        if self.observe:
            self.observe(graph, kind, "before")
        for name, one_pass in PASSES.items():
            if name in self.config.disable_passes:
                self.records.append(PassRecord(kind, name, 0, 0.0, note="disabled"))
                continue
            self.running = f"pass {name!r}"
            before, start = op_counts(graph), time.perf_counter()
            matches = one_pass(graph)
            seconds = time.perf_counter() - start
            after = op_counts(graph)
            change = {op: after[op] - before[op] for op in sorted({*before, *after})}
            changed = {op: n for op, n in change.items() if n}
            self.records.append(PassRecord(kind, name, matches, seconds, changed))
        self.running = "the check after the passes"
        graph.lint()
        check_spec(graph, kind, f"{kind} graph after the passes", random_forward)
        self.running = "the loading of kernels"
        _load_kernels(graph)
        if self.observe:
            self.observe(graph, kind, "after")

    def uuid(self) -> Any:
        """What Inductor's cache keys on: our sources, and the options that change graphs after the
        rewrite. Without the sources, a stale graph is served after an edit of a pass. None, which
        turns the cache off, when a pass that runs first gives no uuid of its own."""
        own = f"{source_hash()}:{','.join(self.config.disable_passes)}"
        if self.first is None:
            return own
        other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if other is None else (own, other)


def _load_kernels(graph: fx.Graph) -> None:
    """Compiles and loads what the graph's ops will launch, now rather than at their first call,
    which may stand in a CUDA graph capture."""
    for node in q2_nodes(graph):
        name = node.target.name().partition("::")[2]  # type: ignore[union-attr]
        if name in ops():
            warm_up(name, map_arg(node.args, lambda n: n.meta["val"]))


@cache
def source_hash() -> str:
    """SHA-256 over every .py and .cu file of the installed package, read once a process."""
    digest = hashlib.sha256()
    for package in ("q2compile", "q2compile.lowering", "q2compile.runtime_kernels"):
        _update(digest, files(package))
    return digest.hexdigest()


def _update(digest: Any, folder: Any) -> None:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and not entry.name.startswith((".", "__")):
            _update(digest, entry)
        elif entry.name.endswith((".py", ".cu", ".cuh")):
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
