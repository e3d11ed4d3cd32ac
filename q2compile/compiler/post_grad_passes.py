"""The runner of the post-grad passes: one `CustomGraphPass`, since torch 2.11 takes only one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.compiler.cache_key import source_hash
from q2compile.compiler.instrument import Instrument
from q2compile.compiler.watcher import Watcher
from q2compile.config import Config
from q2compile.errors import BackendError
from q2compile.passes import NOTES, PASSES
from q2compile.passes.graph_queries import device_of, op_counts, q2_nodes
from q2compile.passes.record import PassRecord
from q2compile.passes.verify import check_spec
from q2compile.runtime_kernels.registry import ops, warm_up
from q2compile.torch_internals.aot_autograd import graph_kind
from q2compile.torch_internals.dynamo import copied
from q2compile.torch_internals.inductor import CustomGraphPass

_MEASURED = 9  # major compute capability of the GPUs on which fuse_rotations="auto" fuses

Fault = Callable[[str, str, fx.GraphModule, Exception], Exception]


@dataclass(frozen=True)
class PutIn:
    """What an instrument puts into one variant of a graph."""

    instrument: Instrument
    recording: bool

    def __call__(self, graph: fx.Graph, kind: str) -> None:
        self.instrument.into(graph, kind, self.recording)

    @property
    def key(self) -> str:
        return self.instrument.key(self.recording)


class PostGradPasses(CustomGraphPass):
    """Runs PASSES over a graph, verifying it at entry and at exit.

    config     names the passes to leave out
    watcher    told of each graph before and after
    first      a pass that was in Inductor's slot before us; it runs first
    fault      called when a pass or a check raises, with (what did, kind, the graph as it came,
               the error); what it returns is raised
    put_in     changes a graph after all passes, and after the watcher has seen it
    records    a PassRecord for each pass and graph, zero matches included
    """

    def __init__(
        self,
        config: Config,
        watcher: Watcher | None = None,
        first: Any = None,
        fault: Fault | None = None,
        put_in: PutIn | None = None,
    ) -> None:
        self.put_in = put_in
        self.config = config
        self.watcher = watcher
        self.first = first
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
        came = copy.deepcopy(graph)  # a module of it, with its code, is made when it is asked for
        try:
            self._run(graph, kind)
        except BackendError:
            raise
        except Exception as error:
            raise self.fault(self.running, kind, copied(_module(graph), came), error) from error

    def _run(self, graph: fx.Graph, kind: str) -> None:
        random_forward = self.config.resolved_policy.random_forward
        self.running = "the check before the passes"
        check_spec(graph, kind, f"{kind} graph before the passes", random_forward)
        if self.watcher is not None:
            self.watcher.before_passes(_module(graph), kind)
        before = op_counts(graph)
        for name, one_pass in PASSES.items():
            if name == "fuse_rotations" and not self._fuses(graph):
                continue
            if name in self.config.disable_passes:
                self.records.append(PassRecord(kind, name, 0, 0.0, note="disabled"))
                continue
            self.running = f"pass {name!r}"
            start = time.perf_counter()
            matches = one_pass(graph)
            seconds = time.perf_counter() - start
            after = op_counts(graph)
            change = {op: after[op] - before[op] for op in sorted({*before, *after})}
            changed = {op: n for op, n in change.items() if n}
            details = NOTES[name](graph) if name in NOTES else []
            self.records.append(PassRecord(kind, name, matches, seconds, changed, details=details))
            before = after
        self.running = "the check after the passes"
        graph.lint()
        check_spec(graph, kind, f"{kind} graph after the passes", random_forward)
        self.running = "the loading of kernels"
        _load_kernels(graph)
        if self.watcher is not None:
            self.watcher.after_passes(_module(graph), kind, self.records)
        if self.put_in is not None:
            self.running = "telemetry"
            self.put_in(graph, kind)
            _load_kernels(graph)

    def _fuses(self, graph: fx.Graph) -> bool:
        """Whether rotating quantisers may compute their operand."""
        device = next((device_of(node.all_input_nodes[0]) for node in q2_nodes(graph)), None)
        return fuses_rotations(self.config, device)

    def uuid(self) -> Any:
        """What Inductor's cache keys on: our sources, and the options that change graphs after the
        rewrite. Without the sources, a stale graph is served after an edit of a pass. None, which
        turns the cache off, when a pass that runs first gives no uuid of its own."""
        own = f"{source_hash()}:{','.join(self.config.disable_passes)}"
        own += f":fuse_rotations={self.config.fuse_rotations},{self.config.telemetry is None}"
        if self.put_in is not None:
            own += f":{self.put_in.key}"
        if self.first is None:
            return own
        other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if other is None else (own, other)


def fuses_rotations(config: Config, device: torch.device | None) -> bool:
    """Whether rotating quantisers on a device may compute their operand."""
    if config.fuse_rotations != "auto":
        return bool(config.fuse_rotations)
    if config.telemetry is not None:
        return False  # a recorded step reads the operand, and is to round as the others do
    if device is None or device.type != "cuda" or config.inner == "eager":
        return False
    return torch.cuda.get_device_capability(device)[0] == _MEASURED


def _module(graph: fx.Graph) -> fx.GraphModule:
    gm = graph.owning_module
    assert gm is not None
    return gm


def _load_kernels(graph: fx.Graph) -> None:
    """Compiles and loads what the graph's ops will launch, now rather than at their first call,
    which may stand in a CUDA graph capture."""
    for node in q2_nodes(graph):
        name = node.target.name().partition("::")[2]  # type: ignore[union-attr]
        if name in ops():
            warm_up(name, map_arg(node.args, lambda n: n.meta["val"]))
