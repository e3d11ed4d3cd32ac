"""The runner of the joint passes."""

from __future__ import annotations

import time
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from q2compile.compiler.cache_key import source_hash
from q2compile.config import Config
from q2compile.passes import JOINT_PASSES, NOTES
from q2compile.passes.record import PassRecord
from q2compile.torch_internals.partitioner import is_checkpointed


class JointPasses(CustomGraphPass):
    """Runs those of JOINT_PASSES that the policy and the options ask for.

    first      a pass that was in Inductor's slot before us; it runs first
    records    where the PassRecord of each pass goes
    """

    def __init__(self, config: Config, records: list[PassRecord], first: Any = None) -> None:
        wanted = {
            "anchor_seeds": True,
            "gather_scattered": True,
            "share_operands": config.resolved_policy.random_forward,
            "gather_codes": True,
            "share_saved_rotations": config.resolved_policy.random_forward,
            "swizzle_saved_scales": True,
            "turn_in_backward": True,
            "mask_again": True,
            "keep_packed": config.keep_packed,
            "recompute_weights": config.recompute_weights is True or config.weights_by_peak,
        }
        left_out = config.disable_passes
        self.by_peak = config.weights_by_peak
        self.names = [name for name in JOINT_PASSES if wanted[name] and name not in left_out]
        self.records = records
        self.first = first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        if not any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")):
            return  # an inference graph: there is nothing to save
        names = list(self.names)
        if self.by_peak and is_checkpointed(graph):  # who checkpoints has said what to save
            names.remove("recompute_weights")
        for name in names:
            start = time.perf_counter()
            matches = JOINT_PASSES[name](graph)
            seconds = time.perf_counter() - start
            details = NOTES[name](graph) if name in NOTES else []
            self.records.append(PassRecord("joint", name, matches, seconds, details=details))

    def uuid(self) -> Any:
        """See `PostGradPasses.uuid`."""
        own = f"{source_hash()}:{','.join(self.names)}"
        if self.first is None:
            return own
        other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if other is None else (own, other)
