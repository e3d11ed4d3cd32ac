# SPDX-License-Identifier: Apache-2.0
"""What the lowerings of one graph tell each other.

The graph that is lowered owns it: it is made when the first lowering of the graph asks, and goes
with the graph. A graph that another one calls is lowered by itself, and has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx
from torch._inductor.virtualized import V

from q2compile.lowering.member import Member
from q2compile.lowering.prologue.expressions import Prologue
from q2compile.runtime_kernels.ops.launch_groups import LAUNCH_GROUP, adjacent_quantizers
from q2compile.runtime_kernels.ops.table import quantizer_of


class LaunchGroup(NamedTuple):
    """Quantizers that are enqueued together, where the last of them stands.

    number  as in the graph, which says by it whose alpha they make
    """

    number: int
    last: fx.Node


@dataclass
class LoweringState:
    """Of one graph. Keys are nodes of it; values are tensors of Inductor's IR but where it says
    otherwise.

    groups       the launch groups of quantizers, as the graph says
    waiting      calls of the group that is being lowered (launches.py)
    products     of two global scales, by their nodes (launches.py writes, gemm reads)
    dequantized  bf16 operands of emulated GEMMs, by the node of their codes
    gathered     rows of those, by that node and the q2.gather_rows that picks them
    ungathered   codes, scales and row numbers that a q2.gather_rows was given, by its node
    made         outputs of a quantizer that was launched with an earlier one (fused_launches.py)
    gate_and_up       the expression of a quantizer's operand (fused_gate_up.py)
    known        what `once` was asked
    """

    groups: dict[fx.Node, LaunchGroup] = field(default_factory=dict)
    waiting: list[Member] = field(default_factory=list)
    products: dict[tuple[fx.Node, fx.Node], Any] = field(default_factory=dict)
    dequantized: dict[fx.Node, Any] = field(default_factory=dict)
    gathered: dict[tuple[fx.Node, fx.Node], Any] = field(default_factory=dict)
    ungathered: dict[fx.Node, tuple[Any, Any, Any]] = field(default_factory=dict)
    made: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    gate_and_up: dict[fx.Node, Prologue] = field(default_factory=dict)
    known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """What the work returned when this key was first asked for, in this graph."""
        if key not in self.known:
            self.known[key] = work()
        return self.known[key]


def lowering_state() -> LoweringState:
    """That of the graph that is lowered."""
    graph: Any = V.graph
    if not hasattr(graph, "q2_lowering_state"):
        graph.q2_lowering_state = LoweringState(groups=_groups(graph.module.graph))
    return graph.q2_lowering_state


def _groups(graph: fx.Graph) -> dict[fx.Node, LaunchGroup]:
    """By quantizers: what the pass group_launches wrote, less what later passes took apart."""
    found: dict[fx.Node, LaunchGroup] = {}
    for run in adjacent_quantizers(graph.nodes):
        for number, group in itertools.groupby(run, _group_number):
            nodes = list(group)
            if number is not None:
                found |= dict.fromkeys(nodes, LaunchGroup(number, nodes[-1]))
    return found


def _group_number(node: fx.Node) -> int | None:
    """None for a call that became a recorded one since: it is more than launches."""
    call = quantizer_of(node)
    return None if call is None or call.recorded else node.meta.get(LAUNCH_GROUP)
