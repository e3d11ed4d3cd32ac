# SPDX-License-Identifier: Apache-2.0
(
    """Which operands are rows that were gathered from a matrix, asked of an FX graph. It
knows the spellings that are left after Inductor's decompositions, which remove index_select,
masked_fill and zeros."""
    ""
)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.graph.views import ALIAS, CAST, COPY, RESHAPE, kind_of
from q2compile.passes.joint.permutations import order_of

_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten._unsafe_index.Tensor)


class Zeroed(NamedTuple):
    """A mask [..., 1] of rows that are zeroed after the gather: where it is set, or is not."""

    mask: fx.Node
    where_set: bool


@dataclass(frozen=True)
class GatheredRows:
    """A matrix that is zeroed(cast(source[index])).

    source  a matrix
    index   integers of any shape, one for each row; negative ones count from the end
    casts   of the rows, the last first; all are functions of each number
    """

    source: fx.Node
    index: fx.Node
    casts: Sequence[fx.Node]
    zeroed: list[Zeroed]

    @property
    def names_all(self) -> bool:
        """Whether the index is known to name every row of the source: it is a permutation, by an
        argsort, of k values per row, divided by k."""
        order = order_of(self.index)
        if order is None:
            return False
        named = order.permutation.meta["val"].numel()
        return statically_known_true(named == self.source.meta["val"].shape[0] * order.k)


def gathered(x: Any) -> GatheredRows | None:
    """The matrix from which x [R, K] is gathered; None if it is not gathered."""
    casts: list[fx.Node] = []
    zeroed: list[Zeroed] = []
    node = x
    while isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
        inner: Any = node.args[0] if node.args else None
        kind = kind_of(node)
        if kind & (ALIAS | COPY) or (kind == RESHAPE and _keeps_rows(node)):
            node = inner
        elif is_rounding(node):
            casts.append(node)
            node = inner
        elif (mask := zeroes_rows(node)) is not None:
            zeroed.append(mask[0])
            node = mask[1]
        else:
            found = _gather(node)
            return found and GatheredRows(*found, casts, zeroed)
    return None


def _gather(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Source and index, of a node that gathers whole rows of a matrix."""
    source: Any = node.args[0] if node.args else None
    index: Any = None
    if node.target in _INDEXED:
        indices: Any = node.args[1]
        index = indices[0] if all(other is None for other in indices[1:]) else None
    elif node.target is _aten.gather.default:
        index = spread(node.args[2]) if node.args[1] in (0, -2) else None
        if index is not None and not _equal(_shape(node)[1], _shape(source)[1]):
            return None  # a part of each row
    if not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return None
    integers = index.meta["val"].dtype in (torch.int32, torch.int64)
    return (source, index) if integers and len(_shape(source)) == 2 else None


def spread(index: Any) -> fx.Node | None:
    """A column [R, 1] that is expanded to [R, K]."""
    if index.target is not _aten.expand.default:
        return None
    column: fx.Node = index.args[0]
    shape = _shape(column)
    return column if len(shape) == 2 and shape[1] == 1 else None


def zeroes_rows(node: fx.Node) -> tuple[Zeroed, Any] | None:
    """The rows that a node sets to zero, and the value of the others; None for other nodes."""
    mask: Any
    if node.target is not _aten.where.self:
        return None
    mask, first, second = node.args
    of_rows = _mask_of_rows(mask, node)
    for where_set, zero, inner in ((True, first, second), (False, second, first)):
        if of_rows is not None and is_zero(zero) and alike(_shape(inner), _shape(node)):
            return Zeroed(of_rows, where_set), inner
    return None


def _mask_of_rows(mask: Any, node: fx.Node) -> fx.Node | None:
    """The mask with one number for each row, if that is what it is."""
    if mask.target is _aten.expand.default:
        mask = mask.args[0]
    of_rows = alike(_shape(mask), (*_shape(node)[:-1], 1))
    return mask if of_rows and mask.meta["val"].dtype == torch.bool else None


def is_zero(node: Any) -> bool:
    """Returns true for a node that is a constant of +0; -0 has another code."""
    places = {_aten.full.default: 1, _aten.scalar_tensor.default: 0}
    if not isinstance(node, fx.Node) or node.target not in places:
        return False
    value = node.args[places[node.target]]
    return isinstance(value, int | float) and str(float(value)) == "0.0"


def is_rounding(node: fx.Node) -> bool:
    """Whether it is a cast from one floating type to another, on one device and in one layout."""
    if kind_of(node) != CAST or not node.kwargs.keys() <= {"dtype"}:
        return False
    source: Any = node.args[0]
    return source.meta["val"].is_floating_point() and node.meta["val"].is_floating_point()


def _keeps_rows(view: fx.Node) -> bool:
    source: Any = view.args[0]
    before, after = _shape(source), _shape(view)
    return bool(before and after) and _equal(before[-1], after[-1])


def _shape(node: Any) -> Any:
    return node.meta["val"].shape


def alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(_equal, a, b))


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)
