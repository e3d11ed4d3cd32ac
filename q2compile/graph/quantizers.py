# SPDX-License-Identifier: Apache-2.0
"""Nodes that quantize, as calls of the table of ops (`runtime_kernels.ops.table`).

call = quantizer_of(node)                 None for other nodes
set_call(node, call.replace(dbias=torch.bfloat16))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from q2compile.graph.nodes import is_q2, name_of
from q2compile.runtime_kernels.ops.table import SPECS, QuantizerCall
from q2compile.runtime_kernels.registry import bound


def quantizer_of(node: Any) -> QuantizerCall | None:
    """The call of a graph node; None if it is not a quantizing op."""
    if not isinstance(node, fx.Node) or not is_q2(node, *SPECS):
        return None
    op = name_of(node.target)
    return QuantizerCall.of(op, bound(op, node.args, node.kwargs))


def quantizers(graph: fx.Graph) -> Iterator[tuple[fx.Node, QuantizerCall]]:
    """The quantizers of a graph, in order."""
    for node in graph.nodes:
        call = quantizer_of(node)
        if call is not None:
            yield node, call


def set_call(node: fx.Node, call: QuantizerCall) -> None:
    """Makes a node that call."""
    node.target = call.spec.overload
    node.args, node.kwargs = call.written()


def is_forward_operand(call: QuantizerCall | None) -> bool:
    """Whether a call makes x or w for fprop: from a matrix, rowwise, deterministic."""
    if call is None or call.source_scheme is not None:
        return False
    return not (call.columnwise or call.draws)
