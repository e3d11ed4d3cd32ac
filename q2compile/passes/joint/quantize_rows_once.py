# SPDX-License-Identifier: Apache-2.0
"""Quantize rows before they are gathered: each row once, however often it is named."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.graph.new_node import write
from q2compile.graph.node_meta import NOTE
from q2compile.graph.nodes import depending_on_tangents, is_q2, outputs_of, update_outputs
from q2compile.graph.quantizers import is_forward_operand, quantizers, set_call
from q2compile.graph.storages import hint_of
from q2compile.passes.joint.gathered_rows import GatheredRows, gathered
from q2compile.runtime_kernels.ops.table import AMAX, MASK, QuantizerCall

_OFTEN = 2  # rows that are gathered, for one that there is, from which on it pays


def quantize_rows_once_pass(graph: fx.Graph) -> int:
    """Quantizing a row needs nothing of the others, but for the global scale: so of a token that
    goes to eight experts the codes are made once, and these are gathered.

    before                                  after
        x = index(h, [rows])                    q = quantize(h, scheme=S, rowwise)
        q = quantize(x, scheme=S, rowwise)      g = gather_rows(q[0], q[1], rows)
        y = grouped_gemm(*q, ...)               y = grouped_gemm(*g, q[2], ...)
        r = requantize(*q, offs=...)            r = requantize(*g, q[2], offs=...)

    The forward saves q, an eighth of what it was; g is tagged so that the backward makes its own
    (an index that it needs anyway, for the gradient of h).

    The global scale is of the rows that are gathered alone. Where the index is not known to name
    all (`names_all`), the others are zero for the quantizer, and so are rows that are zeroed after
    the gather; those are read from a row of zeros behind the last:

        x = index(h, [rows])                    z = where(m, M, rows)
        x = where(m[:, None], 0, x)             p = index_put(full([M + 1], False), [z], True)
        q = quantize(x, scheme=S, rowwise)      q = quantize(where(p[:, None], pad(h), 0), ...)
                                                g = gather_rows(q[0], q[1], z)

    Preconditions: index or gather along rows, through views that leave rows whole and casts, which
    move with the quantizer; blocks of one row; no random bits, which depend on the place; rows are
    gathered `_OFTEN` times as often as there are any. Who else reads x still does: the quantizer is
    cheaper all the same.

    Exact: a quantizer of blocks within rows is a function of each row and of the largest of all,
    and that is the same. A row of zeros has the codes of a row of zeros.
    """
    backward = depending_on_tangents(graph)
    matches = 0
    for node, call in list(quantizers(graph)):
        found = gathered(call.x) if _within_rows(call) else None
        outputs = outputs_of(node)
        if found is None or not all(i in outputs and outputs[i].users for i in (0, 1)):
            continue
        rows = hint_of(found.index.meta["val"].numel())
        there = hint_of(found.source.meta["val"].shape[0])
        if rows is None or there is None:
            node.meta[NOTE] = f"{node.name} is left: its number of rows is not known"
        elif rows < _OFTEN * there:
            node.meta[NOTE] = f"{node.name} is left: {rows} rows, gathered from {there}"
        else:
            _quantize_source(graph, node, call, found, node in backward)
            note = f"{there} rows are quantized for the {rows} that are gathered from them"
            node.meta[NOTE] = f"{node.name}: {note}"
            matches += 1
    if matches:
        graph.eliminate_dead_code()  # gathered rows that nobody reads any more
    return matches


def _within_rows(call: QuantizerCall) -> bool:
    """Whether a quantizer's codes of a row depend on nothing but that row and the global scale."""
    return is_forward_operand(call) and not call.scheme.form and call.scheme.block[0] == 1


def _quantize_source(
    graph: fx.Graph, node: fx.Node, call: QuantizerCall, found: GatheredRows, in_backward: bool
) -> None:
    """Let a quantizer of gathered rows read the source, and gather its codes before each reader."""
    masks, amax = [zeroed.mask for zeroed in found.zeroed], call.args["amax"]
    with graph.inserting_before(node):
        (source, rows), _ = write(node, partial(_named, found), found.source, found.index, *masks)
        if amax is not None and is_q2(amax, AMAX) and amax.args[0] is call.x:
            amax, _ = write(node, torch.ops.q2.amax, source)  # rows of zeros do not change it
    set_call(node, call.replace(x=source, amax=amax))
    update_outputs(node)
    outputs = [output for i, output in sorted(outputs_of(node).items()) if i in (0, 1, MASK)]
    readers = [reader for output in outputs for reader in output.users]
    with graph.inserting_before(min(readers)):
        gathered, written = write(node, _gather, rows, *outputs)
    for one in written if not in_backward else ():
        one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for output, part in zip(outputs, gathered, strict=True):
        output.replace_all_uses_with(part, delete_user_cb=lambda user: user not in written)


def _gather(rows: Tensor, codes: Tensor, scales: Tensor, *mask: Tensor) -> list[Tensor]:
    return [*torch.ops.q2.gather_rows(codes, scales, rows), *(m[rows] for m in mask)]


def _named(
    found: GatheredRows, source: Tensor, index: Tensor, *masks: Tensor
) -> tuple[Tensor, Tensor]:
    """The matrix that is quantized, and the rows that are gathered from its codes."""
    rows = _flat(index)
    for cast in reversed(found.casts):
        to: Any = cast.target
        source = to(source, *cast.args[1:], **cast.kwargs)
    if not masks and found.names_all:
        return source, rows
    if masks:
        count = source.shape[0]
        rows = torch.where(rows < 0, rows + count, rows)
        flat = [_flat(mask) for mask in masks]
        sides = [zeroed.where_set for zeroed in found.zeroed]
        zeroed = [m if s else m.logical_not() for m, s in zip(flat, sides, strict=True)]
        behind = torch.full((), count, dtype=rows.dtype, device=rows.device)
        rows = torch.where(reduce(torch.logical_or, zeroed), behind, rows)
        source = torch.nn.functional.pad(source, (0, 0, 0, 1))
    none = torch.full((source.shape[0],), False, device=rows.device)
    named = none.index_put((rows,), torch.full((), True, device=rows.device))
    zero = torch.full((), 0, dtype=source.dtype, device=source.device)
    return torch.where(named.unsqueeze(1), source, zero), rows


def _flat(tensor: Tensor) -> Tensor:
    """`flatten` would ask for the number of elements, which no node has if sizes are symbols."""
    return tensor if tensor.dim() == 1 else tensor.contiguous().view(-1)
