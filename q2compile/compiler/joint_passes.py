# SPDX-License-Identifier: Apache-2.0
"""The joint passes in Inductor's slot."""

from __future__ import annotations

from torch import fx

from q2compile.compiler.pass_runner import PassRunner
from q2compile.config import resolved_policy, saves_weights_by_peak
from q2compile.graph.nodes import tangents
from q2compile.passes import PassConditions
from q2compile.torch_internals.partitioner import is_checkpointed


class JointPasses(PassRunner):
    """Runs the passes over joint graphs of training. An inference graph saves nothing."""

    kind = "joint"

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        if tangents(graph):
            self.run(graph, "joint")

    def _run(self, graph: fx.Graph, kind: str) -> None:
        self.run_passes(graph, kind)

    def wanted(self, graph: fx.Graph) -> PassConditions:
        config = self.config
        # Under activation checkpointing the user decides what is saved.
        by_peak = saves_weights_by_peak(config) and not is_checkpointed(graph)
        return PassConditions(
            random_forward=resolved_policy(config).random_forward,
            keep_packed=config.keep_packed,
            recompute_weights=config.recompute_weights is True or by_peak,
            fuse_rotations=False,
            seed=config.seed,
        )

    def key(self) -> str:
        config = self.config
        options = (
            resolved_policy(config).random_forward,
            config.keep_packed,
            config.recompute_weights,
            saves_weights_by_peak(config),
            config.seed,
        )
        return f"{config.disable_passes}:{options}"
