# SPDX-License-Identifier: Apache-2.0
"""What the pass group_launches writes into a graph, and the lowerings of that graph read."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from q2compile.runtime_kernels.ops.table import PARTS, quantizer_of

# A key of a quantizer's node.meta: the number of its launch group, in this graph. Quantizers of one
# group are enqueued together, and end in one launch (cuda/quantize/grouped_launch.py).
LAUNCH_GROUP = "q2_launch_group"
# A key of a GEMM's: the group whose last launch makes alpha, the product of its global scales.
ALPHA_FROM = "q2_alpha_from"

_GLOBAL_SCALE = PARTS.index("global scale")
_aten, _prims = torch.ops.aten, torch.ops.prims
# What may stand between quantizers of a group: it computes next to nothing, so that an operand
# which waits is not kept alive for long.
BETWEEN = frozenset(
    [_aten.reshape.default, _aten.view.default, _aten.permute.default, _aten.t.default]
    + [_aten._to_copy.default, _prims.convert_element_type.default, _aten.select.int]
    + [operator.getitem]
)


def adjacent_quantizers(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The quantizers of a graph, in runs: nothing that is computed stands between those of a run,
    and nothing reads what one makes before the last is made."""
    runs: list[list[fx.Node]] = []
    made: set[fx.Node] = set()  # by the run that is open
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
    """Of a quantizer's outputs those that a GEMM multiplies, with their places: none of a
    dequantized operand's."""
    call = quantizer_of(node)
    if call is None or call.scheme.dequantized:
        return []
    places = [operand.first + _GLOBAL_SCALE for operand in call.operands]
    found = [(user.args[1], user) for user in node.users if user.target is operator.getitem]
    return [(place, output) for place, output in found if place in places]  # type: ignore[misc]


def is_between(node: fx.Node) -> bool:
    """Whether a node may stand between quantizers of a run."""
    return node.op == "call_function" and node.target in BETWEEN
