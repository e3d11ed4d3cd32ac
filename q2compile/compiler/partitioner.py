# SPDX-License-Identifier: Apache-2.0
"""The cut of a joint graph. Peak memory decides whether codes of weights are saved or
recomputed."""

from __future__ import annotations

from typing import Any

from torch import fx

from q2compile.compiler.cache_key import source_hash
from q2compile.compiler.watcher import Watcher
from q2compile.passes.joint.recompute_weights import packed_weights
from q2compile.passes.joint.save_weights import known_by_scales, save_codes, save_scales
from q2compile.passes.joint.saved_weights import choose_saved
from q2compile.torch_internals.partitioner import CustomPartitionerFn, is_checkpointed, module_of


class Partitioner(CustomPartitionerFn):
    """Cuts a graph as another partitioner does, then saves the codes of weights if `choose_saved`
    says so, else the scales of those that can be rounded by them.

    The first cut recomputes all codes, as `recompute_weights_pass` has marked them. A graph with
    activation checkpoints has no such marks; the checkpoints decide.

    base        cuts
    parameters  how many the model trains, if the graph holds them all; else 0
    watcher     notified of the choice
    by_scales   whether scales may be saved instead of codes: not if telemetry reads codes
    """

    def __init__(
        self,
        base: Any,
        parameters: int,
        watcher: Watcher | None = None,
        by_scales: bool = True,
    ) -> None:
        self.base = base
        self.by_scales = by_scales
        self.parameters = parameters
        self.watcher = watcher

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Any,
        *,
        static_lifetime_input_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs["static_lifetime_input_indices"] = static_lifetime_input_indices
        forward, backward = self.base(gm, joint_inputs, **kwargs)
        names = {weight.name for weight in packed_weights(gm.graph)}
        if is_checkpointed(gm.graph):
            self._notify(dict.fromkeys(names, "activation checkpointing decides what is saved"))
            return forward, backward
        names &= {node.name for node in backward.graph.nodes}
        # A graph that this one calls is cut by itself, and has no parameters of its own.
        parameters = static_lifetime_input_indices or ()
        whole = 0 < self.parameters <= len(parameters)
        if not names:
            return forward, backward
        choice = choose_saved(forward.graph, backward.graph, names, parameters, whole)
        why = dict.fromkeys(names, choice.why)
        if choice.saved:
            save_codes(forward.graph, backward.graph, names, kwargs["num_fwd_outputs"])
        elif self.by_scales:
            scales = known_by_scales(backward.graph, names)
            save_scales(forward.graph, backward.graph, scales, kwargs["num_fwd_outputs"])
            why |= dict.fromkeys(scales, f"{choice.why}; their scales are saved")
        self._notify(why)
        return module_of(forward, forward.graph), module_of(backward, backward.graph)

    def _notify(self, why: dict[str, str]) -> None:
        if self.watcher is not None:
            self.watcher.weights_chosen(why)

    def uuid(self) -> Any:
        """See `PassRunner.uuid`."""
        base = self.base.uuid()
        return None if base is None else (source_hash(), base, self.parameters, self.by_scales)

    def __reduce__(self) -> Any:
        """Support pickling: torch's caches pickle all settings of Inductor, including this one."""
        if self.uuid() is None:
            raise TypeError("a partitioner without a uuid: what it cuts is not cached")
        return tuple, (self.uuid(),)

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self
