# SPDX-License-Identifier: Apache-2.0
"""Both quantizations of one gradient, along N for dgrad and along T for wgrad, from one read."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from q2compile.passes.graph_queries import is_q2
from q2compile.runtime_kernels.ops.table import (
    PADDED_ENDS,
    QuantizerCall,
    quantizer_of,
    quantizers,
)


def pair_directions_pass(graph: fx.Graph) -> int:
    """Reading the gradient a second time is most of what quantizing it costs.

    before                                        after
        a = quantize(dy, rowwise, seed s)             c = quantize(dy, rowwise, columnwise,
        a0, a1, a2 = a[0], a[1], a[2]                              seeds s and t)
        ...                                           a0, a1, a2 = c[0], c[1], c[2]
        b = quantize(dy, columnwise, seed t)          b0, b1, b2 = c[3], c[4], c[5]
        b0, b1, b2 = b[0], b[1], b[2]                 ...

    The second may keep groups of rows apart, of experts; the result does then.

    Preconditions: one op of each direction on the same tensor, with the same scheme, rotation and
    rng_offset, and a seed each; both seeds, and the ends of the groups, stand before the first of
    the two ops (merge_seeds puts seeds there, so it runs before this pass; padded_ends is put there
    by this one).

    Exact: both directions at once are defined as the two calls, bit for bit.
    """
    waiting: dict[Any, fx.Node] = {}
    pairs = 0
    for node, call in list(quantizers(graph)):
        if (
            not call.rotated
            or call.masked
            or len(call.operands) > 1
            or call.source_scheme is not None
        ):
            continue
        alike = (call.x, *(call.args[name] for name in ("scheme", "transform", "rng_offset")))
        partner = waiting.pop((alike, not call.columnwise), None)
        if partner is None:
            waiting[(alike, call.columnwise)] = node
        elif isinstance(call.operands[0].seed, fx.Node) and all(
            _stands_before(partner, needed) for needed in (call.operands[0].seed, *_groups(call))
        ):
            _replace(graph, first=partner, second=node)
            pairs += 1
    return pairs


def _groups(call: QuantizerCall) -> tuple[Any, ...]:
    """Their ends, of a call that has some."""
    return (call.args["offs"], call.args["padded_offs"]) if call.grouped else ()


def _stands_before(first: fx.Node, needed: fx.Node) -> bool:
    """Whether ``needed`` does, where it can be moved there after that."""
    if is_q2(needed, PADDED_ENDS) and first < needed:
        offs: Any = needed.args[0]
        if offs < first:
            first.prepend(needed)
    return needed < first


def _replace(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Put one call in the place of the first; its outputs 0-2 are the row's, 3-5 the column's."""
    pair = {call.columnwise: node for node in (first, second) if (call := quantizer_of(node))}
    row, column = pair[False], pair[True]
    of_row, of_column = quantizer_of(row), quantizer_of(column)
    assert of_row is not None and of_column is not None
    names = ("columnwise", "columnwise_seed", "offs", "padded_offs")
    call = of_row.replace(**{name: of_column.args[name] for name in names})
    with graph.inserting_before(first):
        args, kwargs = call.written()
        both = graph.call_function(call.spec.overload, args, kwargs)
        both.meta = {**first.meta, "val": [*row.meta["val"], *column.meta["val"]]}
        for node, operand in zip((row, column), call.operands, strict=True):
            for getitem in list(node.users):
                index: Any = getitem.args[1]
                output = graph.call_function(operator.getitem, (both, operand.first + index))
                output.meta = dict(getitem.meta)
                getitem.replace_all_uses_with(output)
                graph.erase_node(getitem)
    graph.erase_node(row)
    graph.erase_node(column)
