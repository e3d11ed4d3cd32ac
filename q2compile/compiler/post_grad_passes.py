# SPDX-License-Identifier: Apache-2.0
"""The post-grad passes in Inductor's slot. It holds one pass, since torch 2.11 takes no list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from q2compile.compiler.instrumentation import Instrumentation
from q2compile.compiler.pass_runner import Fault, PassRunner, module_of
from q2compile.compiler.watcher import Watcher
from q2compile.config import Config, resolved_policy
from q2compile.graph.nodes import device_of, q2_nodes
from q2compile.passes import PassConditions
from q2compile.passes.verify import check_spec
from q2compile.torch_internals.aot_autograd import graph_kind

_MEASURED = 9  # major compute capability of the GPUs on which fuse_rotations="auto" fuses


@dataclass(frozen=True)
class Insertion:
    """An instrumentation, applied to one variant of a graph."""

    instrumentation: Instrumentation
    recording: bool

    def __call__(self, graph: fx.Graph, kind: str) -> None:
        self.instrumentation.insert(graph, kind, self.recording)

    @property
    def key(self) -> str:
        return self.instrumentation.key(self.recording)


class PostGradPasses(PassRunner):
    """Runs the passes over a forward or a backward graph, verifying it at entry and at exit.

    watcher    notified of each graph before and after
    insertion     changes a graph after all passes, and after the watcher has seen it
    """

    kind = "post_grad"

    def __init__(
        self,
        config: Config,
        watcher: Watcher | None = None,
        first: Any = None,
        fault: Fault | None = None,
        insertion: Insertion | None = None,
    ) -> None:
        super().__init__(config, [], first, fault)
        self.watcher = watcher
        self.insertion = insertion

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        self.run(graph, graph_kind(graph))

    def _run(self, graph: fx.Graph, kind: str) -> None:
        random_forward = resolved_policy(self.config).random_forward
        self.running = "the check before the passes"
        check_spec(graph, kind, f"{kind} graph before the passes", random_forward)
        if self.watcher is not None:
            self.watcher.before_passes(module_of(graph), kind)
        self.run_passes(graph, kind)
        self.running = "the check after the passes"
        graph.lint()
        check_spec(graph, kind, f"{kind} graph after the passes", random_forward)
        if self.watcher is not None:
            self.watcher.after_passes(module_of(graph), kind, self.records)
        if self.insertion is not None:
            self.running = "telemetry"
            self.insertion(graph, kind)

    def forget(self, gm: fx.GraphModule) -> None:
        """Remove the records of a graph that is compiled again, which gets new ones."""
        kind = graph_kind(gm.graph)
        self.records[:] = [record for record in self.records if record.graph != kind]

    def wanted(self, graph: fx.Graph) -> PassConditions:
        device = next((device_of(node.all_input_nodes[0]) for node in q2_nodes(graph)), None)
        return PassConditions(
            random_forward=resolved_policy(self.config).random_forward,
            keep_packed=False,
            recompute_weights=False,
            fuse_rotations=fuses_rotations(self.config, device),
            is_lowered=self.config.inner == "inductor",
        )

    def key(self) -> str:
        own = ",".join(self.config.disable_passes)
        own += f":fuse_rotations={self.config.fuse_rotations},{self.config.telemetry is None}"
        return own if self.insertion is None else f"{own}:{self.insertion.key}"


def fuses_rotations(config: Config, device: torch.device | None) -> bool:
    """Whether rotating quantizers on a device may compute their operand."""
    if config.fuse_rotations != "auto":
        return bool(config.fuse_rotations)
    if config.telemetry is not None:
        return False  # a recorded step reads the operand, and is to round as the others do
    if device is None or device.type != "cuda" or config.inner == "eager":
        return False
    return torch.cuda.get_device_capability(device)[0] == _MEASURED
