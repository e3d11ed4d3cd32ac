"""Passes over the joint graph, forward and backward in one, before the partitioner cuts it.

The last two change nothing that is computed. They tag nodes with torch's CheckpointPolicy, in
``node.meta["recompute"]``, which is how torch.utils.checkpoint tells the partitioner what to save
and what to compute again; see ``_functorch/partitioners.py`` of torch 2.11 to 2.13. The min-cut
partitioner looks at the op, the default one at the getitems, so both carry the tag.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from q2compile.config import Config
from q2compile.passes.keep_packed import keep_packed_pass
from q2compile.passes.manager import PassRecord, source_hash
from q2compile.passes.recompute_weights import recompute_weights_pass
from q2compile.passes.share_operands import share_operands_pass
from q2compile.passes.share_rotations import share_saved_rotations_pass
from q2compile.passes.swizzle_scales import swizzle_saved_scales_pass

JOINT_PASSES: dict[str, Callable[[fx.Graph], int]] = {
    "share_operands": share_operands_pass,  # for the next one: views of one x become one
    "share_saved_rotations": share_saved_rotations_pass,
    "swizzle_saved_scales": swizzle_saved_scales_pass,  # names schemes that those do not know
    # In this order: asked for both, the packed activations are kept and the weights' codes are not.
    "keep_packed": keep_packed_pass,
    "recompute_weights": recompute_weights_pass,
}


class JointPasses(CustomGraphPass):
    """Runs those of JOINT_PASSES that the policy and the options ask for.

    first      a pass that was in Inductor's slot before us; it runs first
    records    where the PassRecord of each pass goes
    """

    def __init__(self, config: Config, records: list[PassRecord], first: Any = None) -> None:
        wanted = {
            "share_operands": config.resolved_policy.random_forward,
            "share_saved_rotations": config.resolved_policy.random_forward,
            "swizzle_saved_scales": True,
            "keep_packed": config.keep_packed,
            "recompute_weights": config.recompute_weights,
        }
        left_out = config.disable_passes
        self.names = [name for name in JOINT_PASSES if wanted[name] and name not in left_out]
        self.records = records
        self.first = first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        if not any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")):
            return  # an inference graph: there is nothing to save
        for name in self.names:
            start = time.perf_counter()
            matches = JOINT_PASSES[name](graph)
            self.records.append(PassRecord("joint", name, matches, time.perf_counter() - start))

    def uuid(self) -> Any:
        """See `PassManager.uuid`."""
        own = f"{source_hash()}:{','.join(self.names)}"
        if self.first is None:
            return own
        other = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if other is None else (own, other)
