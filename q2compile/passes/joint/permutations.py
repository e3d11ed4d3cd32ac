# SPDX-License-Identifier: Apache-2.0
(
    """Which indices are permutations, and what undoes them, asked of an FX graph after Inductor's
decompositions, where arange has become prims.iota and floor_divide has become div."""
    ""
)

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.graph.views import CAST, COPY, PERMUTE, VIEWS, kind_of

_aten, _prims = torch.ops.aten, torch.ops.prims
_WIDE = (torch.int32, torch.int64)
_DRESSED = VIEWS & ~PERMUTE | COPY | CAST  # what keeps the order of elements
_SORTS = (_aten.sort.default, _aten.sort.stable)


class Order(NamedTuple):
    """An index that is permutation // k, so that it names each number k times."""

    permutation: fx.Node
    k: int


def order_of(index: Any) -> Order | None:
    """How an index derives from a permutation of known origin, through views and casts. k is 1 for
    the permutation itself; its size is a multiple of k if the caller says so."""
    node = _undressed(index)
    if node.target is not _aten.div.Tensor_mode:
        return Order(node, 1) if is_permutation(node) else None
    args: Any = node.args
    permutation, k = _undressed(args[0]), args[1]
    rounds = node.kwargs.get("rounding_mode") in ("floor", "trunc")
    known = isinstance(k, int) and k > 0 and rounds
    return Order(permutation, k) if known and is_permutation(permutation) else None


def is_permutation(node: fx.Node) -> bool:
    """Whether a node is an argsort of a vector, or the inverse of a permutation."""
    return _sorted(node) is not None or inverted(node) is not None


def inverted(node: fx.Node) -> fx.Node | None:
    """The permutation p that a node is the inverse of: argsort(p), or what counts up, put where p
    says.

        index_put(empty, [p], iota)         scatter(empty, 0, p, iota)
    """
    args: Any = node.args
    source = _sorted(node)
    if source is not None:
        source = _undressed(source)
        return source if _ascends(args[0]) and is_permutation(source) else None
    if node.target is _aten.index_put.default and len(args[1]) == 1 and not any(args[3:]):
        base, (index,), values = args[:3]
    elif node.target is _aten.scatter.src:
        base, index, values = args[0], args[2], args[3]
    else:
        return None
    if not isinstance(index, fx.Node) or not _counts_up(values):
        return None
    index = _undressed(index)
    alike = _same_numel(base, index) and _same_numel(index, values)
    return index if alike and is_permutation(index) else None


def inverse_in(permutation: fx.Node, before: fx.Node) -> fx.Node | None:
    """A node ahead of another one that is the inverse of a permutation."""
    own = inverted(permutation)
    if own is not None:
        return own
    pending, seen = [permutation], {permutation}
    while pending:
        for reader in pending.pop().users:
            if reader < before and inverted(reader) is permutation:
                return reader
            passes_on = kind_of(reader) & _DRESSED or reader.target in _SORTS
            if passes_on and reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return None


def _sorted(node: fx.Node) -> fx.Node | None:
    """The vector that a node is the argsort of."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    sort: Any = node.args[0]
    vector = sort.args[0] if sort.target in _SORTS else None
    return vector if vector is not None and vector.meta["val"].dim() == 1 else None


def _ascends(sort: fx.Node) -> bool:
    """Whether a sort is in ascending order, which may be given as its third argument."""
    return not any(sort.args[2:]) and not sort.kwargs.get("descending")


def _counts_up(node: Any) -> bool:
    """Whether a node is 0, 1, ..."""
    if not isinstance(node, fx.Node):
        return False
    node = _undressed(node)
    start = (node.kwargs.get("start"), node.kwargs.get("step"))
    return node.target is _prims.iota.default and start == (0, 1)


def _undressed(node: fx.Node) -> fx.Node:
    """An index without views and casts of it."""
    while kind_of(node) & _DRESSED:
        inner: Any = node.args[0]
        wide = inner.meta["val"].dtype in _WIDE and node.meta["val"].dtype in _WIDE
        if not wide or not _same_numel(node, inner):
            break
        node = inner
    return node


def _same_numel(a: Any, b: Any) -> bool:
    return statically_known_true(a.meta["val"].numel() == b.meta["val"].numel())
