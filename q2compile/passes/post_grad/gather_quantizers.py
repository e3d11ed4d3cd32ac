# SPDX-License-Identifier: Apache-2.0
"""Move quantizers next to others, so that they share launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from q2compile.graph.launch_groups import adjacent_quantizers, is_between
from q2compile.graph.nodes import needed_behind
from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.storages import SMALL
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import Tail, can_share
from q2compile.runtime_kernels.cuda.quantize.plan import tail_launch_of_scheme

_REACH = 2  # groups: what is made early waits for no more GEMMs than those


def gather_quantizers_pass(graph: fx.Graph) -> int:
    """A quantizer that stands alone needs a launch of its own for its scales. Moved behind others,
    it shares theirs.

    before                                  after
        x = quantize(x, ..., S)                 x = quantize(x, ..., S)
        q = quantize(w_q, ..., S)               q = quantize(w_q, ..., S)
        a = gemm(x..., q...)                    k = quantize(w_k, ..., S)
        k = quantize(w_k, ..., S)               a = gemm(x..., q...)
        b = gemm(x..., k...)                    b = gemm(x..., k...)

    Likewise the requantization of x for wgrad, behind those of dy and w for dgrad.

    Preconditions:

    - One of the two groups before it has the same scheme, and room in its last launch.
    - Its inputs exist at that group's end, except for views and casts, which move with it.
    - Its outputs, which live for a GEMM or two longer, take at most `SMALL` bytes together with
      those moved to that group before.

    Exact: the same operations run, only earlier."""
    groups = adjacent_quantizers(graph.nodes)
    held = [0] * len(groups)  # bytes that were moved to each
    moved = 0
    for i, group in enumerate(groups):
        if len(group) != 1:
            continue
        (node,) = group
        size = _bytes(node)
        for j in range(i - 1, max(i - 1 - _REACH, -1), -1):
            earlier = groups[j]
            if not earlier or size is None or held[j] + size > SMALL or not _fits(earlier, node):
                continue
            needed = needed_behind(node, earlier[-1], is_between)
            if needed is None:
                continue
            at = earlier[-1]
            for one in (*needed, node):
                at.append(one)
                at = one
            earlier.append(node)
            group.clear()
            held[j] += size
            moved += 1
            break
    return moved


def _fits(group: Iterable[fx.Node], node: fx.Node) -> bool:
    calls = [call for call in map(quantizer_of, (*group, node)) if call is not None]
    tails = [Tail(tail_launch_of_scheme(c.scheme, c.transform), len(c.operands)) for c in calls]
    return len({call.scheme for call in calls}) == 1 and can_share(tails)


def _bytes(node: fx.Node) -> int | None:
    """Bytes of its outputs; None if sizes are symbolic."""
    tensors: list[Any] = [v for v in tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor)]
    sizes = [t.numel() * t.element_size() for t in tensors]
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None
