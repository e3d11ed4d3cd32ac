# SPDX-License-Identifier: Apache-2.0
"""A weight that the graph gathers, and what is between the gather and the weight's quantizer."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from q2compile.graph.views import (
    CAST,
    COPY,
    ITEM,
    PERMUTE,
    RESHAPE,
    SPLIT,
    VIEWS,
    kind_of,
    transposes,
)
from q2compile.runtime_kernels.numerics.shards import ShardLayout

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_JOINS = (_aten.cat.default, _c10d.wait_tensor.default)


@dataclass(frozen=True)
class GatheredWeight:
    """The operand of a quantizer, of which each rank has a part: w [N, K], or a stack [E, N, K] as
    a matrix [E * N, K].

    gather   the all-gather of the parts
    between  views and casts from the gathered weight to the quantizer, in order
    layout   how it is cut, as the quantizer sees it
    readers  all that reads the gathered weight, by way of such views and casts or not
    """

    gather: fx.Node
    between: tuple[fx.Node, ...]
    layout: ShardLayout
    readers: frozenset[fx.Node]

    @property
    def shard(self) -> fx.Node:
        shard: Any = self.gather.args[0]
        return shard

    def as_matrix(self, shard: torch.Tensor) -> torch.Tensor:
        """A part [E * N, K], by the views and casts that the whole weight goes through. It has its
        own dtype: before the pass the gather had it in memory; now the kernel that quantizes it may
        cast it, and Inductor keeps the fp32 value of a cast to bf16 unless its bits are asked for.
        """
        is_computed = self.shard.op != "placeholder"
        for step in self.between:
            if kind_of(step) != RESHAPE:
                target: Any = step.target
                shard, is_computed = target(shard, *step.args[1:], **step.kwargs), True
        shard = shard.reshape(-1, self.layout.shard[2])
        if shard.dtype.itemsize == 2 and is_computed:
            return shard.view(torch.int16).view(shard.dtype)
        return shard


def gather_behind(x: fx.Node) -> fx.Node | None:
    """The all-gather of which ``x`` is the result, by way of any views, casts, splits and joins."""
    node: Any = x
    while not _calls(node, _c10d.all_gather_into_tensor):
        if not (kind_of(node) & (VIEWS | CAST | COPY | SPLIT | ITEM) or node.target in _JOINS):
            return None
        node = node.args[0][0] if node.target is _aten.cat.default else node.args[0]
    return node


def gathered_weight(x: fx.Node) -> GatheredWeight | None:
    """``x`` as a gathered weight, if it is one.

    Between the gather along dimension 0 and ``x`` may stand

        split and cat    a gather along another dimension, as functional collectives write it
        permute          of the last two dimensions, contiguous again or not
        view             of the same sizes, or of a stack as a matrix
        a cast
    """
    between: list[fx.Node] = []
    while _is_seen_through(x):
        between.insert(0, x)
        x = x.args[0]  # type: ignore[assignment]
    wait, dim = _split(x) if x.target is _aten.cat.default else (x, 0)
    gather: Any = wait.args[0] if wait is not None and _calls(wait, _c10d.wait_tensor) else None
    if not isinstance(gather, fx.Node) or not _calls(gather, _c10d.all_gather_into_tensor):
        return None
    shape = gather.args[0].meta["val"].shape  # type: ignore[union-attr]
    if len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape):
        return None
    sizes, dim = [1, *shape][-3:], dim + 3 - len(shape)
    for step in between:
        if kind_of(step) == PERMUTE:
            if step.meta["val"].dim() != len(shape):  # of a stack as a matrix
                return None
            sizes[1], sizes[2] = sizes[2], sizes[1]
            dim = 3 - dim if dim else 0
    assert wait is not None
    ranks: Any = gather.args[1]
    whole = [size * ranks if i == dim else size for i, size in enumerate(sizes)]
    layout = ShardLayout.of(whole, sizes, dim)
    return GatheredWeight(gather, tuple(between), layout, frozenset(_readers(wait)))


def _is_seen_through(node: fx.Node) -> bool:
    kind = kind_of(node)
    if kind & (CAST | COPY):
        return True
    if not kind & (RESHAPE | PERMUTE):
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in (*before, *after)):
        return False
    if kind == RESHAPE:
        is_stack_as_matrix = len(before) == 3 and len(after) == 2 and before[-1] == after[-1]
        return bool(before == after or is_stack_as_matrix)
    return transposes(node)


def _split(cat: fx.Node) -> tuple[fx.Node | None, int]:
    """The tensor of which a cat joins all parts again along another dimension; that dimension."""
    parts, *dims = cat.args
    if any(part.target is not operator.getitem for part in parts):  # type: ignore[union-attr]
        return None, 0
    splits = {part.args[0] for part in parts}  # type: ignore[union-attr]
    split: Any = splits.pop() if len(splits) == 1 else None
    if getattr(split, "target", None) is not _aten.split.Tensor or len(split.args) > 2:
        return None, 0
    whole: Any = split.args[0]
    count = len(split.meta["val"])
    in_order = [part.args[1] for part in parts] == list(range(count))  # type: ignore[union-attr]
    gather: Any = whole.args[0] if _calls(whole, _c10d.wait_tensor) else None
    if not in_order or not _calls(gather, _c10d.all_gather_into_tensor):
        return None, 0
    rows = gather.args[0].meta["val"].shape[0]
    dim: Any = dims[0] if dims else 0
    dim = dim % len(cat.meta["val"].shape)
    return (whole, dim) if split.args[1] == rows and dim > 0 else (None, 0)


def _readers(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        joins = kind_of(user) & (SPLIT | ITEM) or user.target is _aten.cat.default
        passes_on = joins or _is_seen_through(user)
        found |= _readers(user) if passes_on else {user}
    return found


def _calls(node: Any, packet: Any) -> bool:
    return getattr(node, "target", None) is packet.default
