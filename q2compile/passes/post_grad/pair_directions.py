# SPDX-License-Identifier: Apache-2.0
"""Quantize a matrix along its rows and along its columns from one read."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.graph.nodes import choice_of, is_q2, tangents
from q2compile.graph.quantizers import quantizer_of, quantizers
from q2compile.graph.storages import SMALL, WORTH_TIME, bytes_of
from q2compile.runtime_kernels.ops.table import PADDED_ENDS, QuantizerCall
from q2compile.runtime_kernels.registry import REFERENCE


def pair_directions_pass(graph: fx.Graph) -> int:
    """Reading the gradient a second time is most of what quantizing it costs.

    before                                        after
        a = quantize(dy, rowwise, seed s)             c = quantize(dy, rowwise, columnwise,
        a0, a1, a2 = a[0], a[1], a[2]                              seeds s and t)
        ...                                           a0, a1, a2 = c[0], c[1], c[2]
        b = quantize(dy, columnwise, seed t)          b0, b1, b2 = c[3], c[4], c[5]
        b0, b1, b2 = b[0], b[1], b[2]                 ...

    The second may keep groups of rows apart, of experts; the result does then. A recipe that
    rotates what wgrad multiplies alone (nvfp4) has such pairs of dy and of x:

        a = quantize(x, rowwise)                      c = quantize(x, rowwise, columnwise,
        b = quantize(x, columnwise, transform="rht16")     transform="rht16", rotate_rows=False)

    The first gradient of a backward, that of the logits, stays in two if it is large: more than 2%
    of the graph's inputs, and than 64 MiB. All activations are alive then. Where GEMMs are
    emulated, both operands at once are twice the bytes of the logits: 6% of the peak of the 30M
    Llama at 64 x 512 tokens.

    Preconditions: one op of each direction on the same tensor, with the same scheme and amax; they
    rotate, or (fp8) share one scale for the tensor; both seeds, and the ends of the groups, stand
    before the first of the two ops (merge_seeds puts seeds there, so it runs before this pass;
    padded_ends is put there by this one). The same rotation and rng_offset; or else
      - rows are not rotated, columns are, and x does not lie in columns;
      - a kernel serves the pair: where the reference does, Inductor may have one for the rows;
      - the rng_offset becomes that of the columns, the only one that share_saved_rotations changes.

    Exact: rowwise and columnwise at once are defined as the two calls, bit for bit. Rows whose
    random bits come at another rng_offset, under their own seed, have the same distribution.
    """
    waiting: dict[Any, fx.Node] = {}
    most = _most_bytes(graph)
    pairs = 0
    for node, call in list(quantizers(graph)):
        if call.masked or len(call.operands) > 1 or call.source_scheme is not None:
            continue
        keys = _keys(call)
        found = [waiting[of_partner] for _, of_partner in keys if of_partner in waiting]
        partner = next((other for other in found if _is_pair(other, node)), None)
        if partner is None:
            waiting |= {own: node for own, _ in keys}
            continue
        waiting = {key: other for key, other in waiting.items() if other is not partner}
        if bytes_of([call.x]) <= most:
            _replace(graph, first=partner, second=node)
            pairs += 1
        most = math.inf  # for all but the first
    return pairs


def _most_bytes(graph: fx.Graph) -> float:
    """Bytes of the first gradient, from which on it costs too much memory to be a pair."""
    if not tangents(graph):
        return math.inf
    return max(WORTH_TIME * bytes_of(graph.find_nodes(op="placeholder")), SMALL)


def _keys(call: QuantizerCall) -> list[tuple[Any, Any]]:
    """Pairs of keys: the key under which the call waits for a partner, and that of the partner,
    with the same rotation or with unrotated rows."""
    same = call.x, call.args["scheme"], call.args["amax"]
    alike = (*same, call.args["transform"], call.args["rng_offset"])
    found: list[tuple[Any, Any]] = []
    if call.rotated or call.scheme.is_tensorwise:
        found.append(((alike, call.columnwise), (alike, not call.columnwise)))
    if call.rotated == call.columnwise:
        found.append(((same, call.columnwise), (same, not call.columnwise)))
    return found


def _is_pair(first: fx.Node, second: fx.Node) -> bool:
    """Whether two such calls can be one, in place of the first."""
    call = quantizer_of(second)
    assert call is not None
    seed = call.operands[0].seed
    needed = [arg for arg in (seed, *_groups(call)) if isinstance(arg, fx.Node)]
    if not all(_stands_before(first, node) for node in needed):
        return False
    both = _both(first, second)
    if both.rotates_rows:
        return isinstance(seed, fx.Node) or both.scheme.is_tensorwise
    of_rows, of_columns = both.x.meta["val"].stride()
    in_columns = statically_known_true(of_rows == 1) and statically_known_true(of_columns != 1)
    return not in_columns and choice_of(both.spec.name, both.positional).name != REFERENCE


def _groups(call: QuantizerCall) -> tuple[Any, ...]:
    """The ends of a call's groups; () if it has none."""
    return (call.args["offs"], call.args["padded_offs"]) if call.grouped else ()


def _stands_before(first: fx.Node, needed: fx.Node) -> bool:
    """Whether ``needed`` comes before ``first``, after moving it there if that is possible."""
    if is_q2(needed, PADDED_ENDS) and first < needed:
        offs: Any = needed.args[0]
        if offs < first:
            first.prepend(needed)
    return needed < first


def _row_and_column(*nodes: fx.Node) -> tuple[fx.Node, fx.Node]:
    found = {call.columnwise: node for node in nodes if (call := quantizer_of(node))}
    return found[False], found[True]


def _both(first: fx.Node, second: fx.Node) -> QuantizerCall:
    """The call that makes the operands of two."""
    of_row, of_column = map(quantizer_of, _row_and_column(first, second))
    assert of_row is not None and of_column is not None
    names = ("columnwise", "columnwise_seed", "offs", "padded_offs", "transform", "rng_offset")
    rotate_rows = of_row.transform == of_column.transform
    columns = {name: of_column.args[name] for name in names}
    return of_row.replace(rotate_rows=rotate_rows, **columns)


def _replace(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Put one call in place of the first; its outputs 0-2 are the row's, 3-5 the column's."""
    row, column = _row_and_column(first, second)
    call = _both(first, second)
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
