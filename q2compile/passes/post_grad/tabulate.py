# SPDX-License-Identifier: Apache-2.0
"""Tables of sines and cosines that many elements share."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from q2compile.graph.nodes import q2_nodes
from q2compile.graph.views import CAST, VIEWS, is_pointwise, readers
from q2compile.torch_internals.inductor import in_memory

_aten = torch.ops.aten
_ANGLES = (_aten.cos.default, _aten.sin.default)
_SHARED = 8  # elements that are computed from each element of a table


def tabulate_pass(graph: fx.Graph) -> int:
    """The tables of rotary embeddings are put into memory.

    before                                 after
        c = cos(angles)  # [S, D]              c = cos(angles)
        a = mul(q, c)    # [B, H, S, D]        t = inductor_force_stride_order(c, (D, 1))
        b = mul(k, c)                          a = mul(q, t)
                                               b = mul(k, t)

    Inductor computes a number where it is read, as a rule: the sine and the cosine anew for every
    element of q and k, in every layer, forward and backward. On an H200 that is more than half of
    the time of those kernels (30m Llama, 64 x 512 tokens: forward 64 us, with tables 24), and keeps
    quantizers from computing their operand, RoPE's backward (`fuse_rotations`), since their kernels
    have no sine.

    Preconditions: the graph has quantized products; sizes are known; the table is of fp32, and
    read, through views and casts, by what has `_SHARED` times as many elements.

    Exact: fp32 is what Inductor has them in, whether they are in memory or not.
    """
    if next(q2_nodes(graph), None) is None:
        return 0
    matches = 0
    for node in [n for n in graph.nodes if n.target in _ANGLES]:
        table = _last_of_its_size(node)
        value = table.meta["val"]
        size, read = _elements(table), sum(map(_elements, readers(table, VIEWS | CAST)))
        if value.dtype != torch.float32 or not 0 < _SHARED * size <= read:
            continue
        with graph.inserting_after(table):
            stored = graph.call_function(in_memory(), (table, value.stride()))
        stored.meta["val"] = value
        table.replace_all_uses_with(
            stored, delete_user_cb=functools.partial(operator.is_not, stored)
        )
        matches += 1
    return matches


def _last_of_its_size(node: fx.Node) -> fx.Node:
    """The last of a row of operations on each number of a table: HF multiplies by a constant."""
    while len(node.users) == 1:
        (reader,) = node.users
        alike = _elements(reader) == _elements(node) and reader.all_input_nodes == [node]
        if not alike or not is_pointwise(reader) or _dtype(reader) != _dtype(node):
            break
        node = reader
    return node


def _elements(node: fx.Node) -> int:
    """The number of elements of a node; 0 if it is not known."""
    value: Any = node.meta.get("val")
    size = value.numel() if isinstance(value, torch.Tensor) else 0
    return size if isinstance(size, int) else 0


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype
