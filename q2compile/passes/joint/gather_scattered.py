# SPDX-License-Identifier: Apache-2.0
"""Scattered additions of rows become gathers and sums where the index is a permutation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from q2compile.graph.new_node import write
from q2compile.passes.joint.gathered_rows import alike, is_zero, spread
from q2compile.passes.joint.permutations import Order, inverse_in, order_of
from q2compile.torch_internals.inductor import SHORT_SUM

_aten = torch.ops.aten
_PUTS = (_aten.index_put.default, _aten._unsafe_index_put.default)


def gather_scattered_pass(graph: fx.Graph) -> int:
    """The gradient of rows that were gathered is added up, row by row, into zeros: by atomic
    additions, in the type of the rows and in any order. Where the gather was by a permutation, as
    tokens are sorted by their experts, which rows make a sum is known without adding.

    before                                  after
        p = sort(experts)[1]                    p = sort(experts)[1]
        x = index(h, [p // k])                  x = index(h, [p // k])
        dh = index_put(0, [p // k], dx, True)   i = index_put(empty, [p], iota)  # p's inverse
                                                d = reshape(index(dx, [i]), [-1, k, K])
                                                dh = sum(d, [1])

        y = index(z, [i])                       y = index(z, [i])
        dz = index_put(0, [i], dy, True)        dz = index(dy, [p])
        u = index_put(0, [p], v)                u = index(v, [i])

    scatter_add along rows is rewritten likewise. An inverse that the graph has is read; instead of
    zeros there may be any tensor, to which the sum is added, or of which nothing is left.

    Preconditions: the index is a permutation of all rows, or that divided by k, as its origin shows
    (`permutations.py`); floating-point rows; k is at most SHORT_SUM, since longer sums are
    reductions, which take longer than adding (8 rows for each of [8192, 2048] on an H200, torch
    2.11: 328 us as a reduction, 176 added, 72 unrolled).

    Not bit for bit: sums of k rows are in fp32 and rounded once, where they were rounded k - 1
    times in an order that changed from run to run; of one row 0 is not added, so -0 stays.
    """
    matches = 0
    for node in list(graph.nodes):
        found = _scattered(node)
        if found is not None:
            with graph.inserting_before(node):
                made = _gathered(node, found)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            matches += 1
    return matches


class _Scattered(NamedTuple):
    """base [T, ...], to which rows [T * k, ...] are added; None: in whose place they are put."""

    base: fx.Node | None
    rows: fx.Node
    order: Order


def _scattered(node: fx.Node) -> _Scattered | None:
    args: Any = node.args
    added = node.target not in _PUTS or args[3:] == (True,)
    if node.target in _PUTS and len(args[1]) == 1:
        base, (index,), rows = args[:3]
    elif node.target is _aten.scatter_add.default:
        base, index, rows = args[0], _of_rows(*args[1:]), args[3]
    else:
        return None
    order = order_of(index) if isinstance(index, fx.Node) else None
    if order is None or order.k > (SHORT_SUM if added else 1):
        return None
    to, of = base.meta["val"], rows.meta["val"]
    known = all(isinstance(size, int) for size in of.shape[1:]) and of.is_floating_point()
    named = order.permutation.meta["val"].shape
    if not known or not alike(of.shape, (*named, *to.shape[1:])):
        return None
    if not alike(named, (to.shape[0] * order.k,)):
        return None
    return _Scattered(base if added else None, rows, order)


def _of_rows(dim: int, index: fx.Node, rows: fx.Node) -> fx.Node | None:
    """scatter_add's index as one index per row; None if it is anything else."""
    of = rows.meta["val"]
    if dim not in (0, -of.dim()) or not alike(index.meta["val"].shape, of.shape):
        return None
    return index if of.dim() == 1 else spread(index)


def _gathered(node: fx.Node, found: _Scattered) -> fx.Node:
    base, rows, (permutation, k) = found
    inverse = inverse_in(permutation, node)
    summands = () if base is None or is_zero(base) else (base,)

    def gathered(rows: Tensor, order: Tensor, *base: Tensor) -> Tensor:
        # Its values are known to be valid rows.
        made = _aten._unsafe_index(rows, [order if inverse else _inverse_of(order)])
        if k > 1:
            made = made.view(-1, k, *rows.shape[1:]).sum(1)
        return base[0] + made if base else made

    made: fx.Node = write(node, gathered, rows, inverse or permutation, *summands)[0]
    return made


def _inverse_of(permutation: Tensor) -> Tensor:
    like: Any = {"dtype": permutation.dtype, "device": permutation.device}
    count = permutation.shape[0]
    counted = torch.ops.prims.iota(count, start=0, step=1, requires_grad=False, **like)
    return torch.full((count,), 0, **like).index_put((permutation,), counted)
