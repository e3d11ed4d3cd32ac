# SPDX-License-Identifier: Apache-2.0
"""The state of one graph's lowering, shared by all lowerings.

The graph that is lowered owns it. It is created when the graph's first lowering needs it, and freed
with the graph. A graph that another one calls is lowered on its own, and has its own state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx
from torch._inductor.virtualized import V

from q2compile.graph.launch_groups import adjacent_quantizers
from q2compile.graph.node_meta import LAUNCH_GROUP
from q2compile.graph.quantizers import quantizer_of
from q2compile.lowering.member import Member


class LaunchGroup(NamedTuple):
    """Quantizers whose launches are grouped, at the place of the last of them.

    number  as in the graph, where GEMMs name the group that computes their alpha by it
    """

    number: int
    last: fx.Node


@dataclass
class LoweringState:
    """The state of one graph's lowering. Keys are its nodes; values are tensors of Inductor's IR
    unless another type is named.

    groups       the launch groups of quantizers, read from the graph
    waiting      calls of the group that is being lowered, not launched yet (launches.py)
    products     alpha of two global scales, by their nodes (set by launches.py, read by gemm.py)
    dequantized  bf16 operands of emulated GEMMs, by the node of their codes
    in_e4m3      e4m3 operands of FP8 GEMMs and their scales, likewise
    gathered     gathered rows of those, by that node and the q2.gather_rows node
    ungathered   the arguments of a q2.gather_rows (codes, scales, rows), by its node
    made         outputs of a quantizer that an earlier one's kernel computes (fused_launches.py)
    known        results of `once`
    """

    groups: dict[fx.Node, LaunchGroup] = field(default_factory=dict)
    waiting: list[Member] = field(default_factory=list)
    products: dict[tuple[fx.Node, fx.Node], Any] = field(default_factory=dict)
    dequantized: dict[fx.Node, Any] = field(default_factory=dict)
    in_e4m3: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    gathered: dict[tuple[fx.Node, fx.Node], Any] = field(default_factory=dict)
    ungathered: dict[fx.Node, tuple[Any, Any, Any]] = field(default_factory=dict)
    made: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """The result of `work` for this key, computed once per graph."""
        if key not in self.known:
            self.known[key] = work()
        return self.known[key]


def lowering_state() -> LoweringState:
    """The state of the graph that is lowered."""
    graph: Any = V.graph
    if not hasattr(graph, "q2_lowering_state"):
        graph.q2_lowering_state = LoweringState(groups=_groups(graph.module.graph))
    return graph.q2_lowering_state


def _groups(graph: fx.Graph) -> dict[fx.Node, LaunchGroup]:
    """Quantizer -> its group, as the pass group_launches wrote it, except where later passes have
    separated quantizers."""
    found: dict[fx.Node, LaunchGroup] = {}
    for run in adjacent_quantizers(graph.nodes):
        for number, group in itertools.groupby(run, _group_number):
            nodes = list(group)
            if number is not None:
                found |= dict.fromkeys(nodes, LaunchGroup(number, nodes[-1]))
    return found


def _group_number(node: fx.Node) -> int | None:
    """A call's group; None if telemetry records the call, which is then more than launches."""
    call = quantizer_of(node)
    return None if call is None or call.recorded else node.meta.get(LAUNCH_GROUP)
