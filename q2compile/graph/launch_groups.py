# SPDX-License-Identifier: Apache-2.0
"""Which quantizers of a graph are adjacent, so that they can share launches."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.views import CAST, ITEM, PART, VIEWS, kind_of
from q2compile.runtime_kernels.ops.table import PARTS

_GLOBAL_SCALE = PARTS.index("global scale")


def adjacent_quantizers(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The quantizers of a graph, in runs. Between those of a run nothing is computed, and no output
    of a run is read before its last quantizer."""
    runs: list[list[fx.Node]] = []
    made: set[fx.Node] = set()  # by the current run
    for node in nodes:
        quantizes = quantizer_of(node) is not None
        own = node.target is operator.getitem and node.args[0] in made
        reads = not own and not made.isdisjoint(node.all_input_nodes)
        if reads or not (quantizes or is_between(node)):
            made = set()
        if quantizes and not made:
            runs.append([])
        if quantizes:
            runs[-1].append(node)
        if quantizes or own:
            made.add(node)
    return runs


def global_scales(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The outputs of a quantizer that are global scales, with their places; none for dequantized
    operands."""
    call = quantizer_of(node)
    if call is None or call.scheme.dequantized:
        return []
    places = [operand.first + _GLOBAL_SCALE for operand in call.operands]
    found = [(user.args[1], user) for user in node.users if user.target is operator.getitem]
    return [(place, output) for place, output in found if place in places]  # type: ignore[misc]


def is_between(node: fx.Node) -> bool:
    """Whether a node may be between quantizers of a run. It computes next to nothing, so no operand
    stays alive for long because its launch is delayed."""
    return bool(kind_of(node) & (VIEWS | CAST | PART | ITEM))
