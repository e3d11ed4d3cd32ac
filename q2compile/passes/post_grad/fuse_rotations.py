# SPDX-License-Identifier: Apache-2.0
"""Mark rotating quantizers that may compute their operand instead of reading it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from q2compile.graph.node_meta import MAY_FUSE, PAIR, READS_THE_SAME
from q2compile.graph.nodes import needed_behind
from q2compile.graph.quantizers import quantizer_of, quantizers
from q2compile.graph.storages import Storage, storages
from q2compile.graph.views import ELEMENTS, is_pointwise, kind_of
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall


def fuse_rotations_pass(graph: fx.Graph) -> int:
    """Mark every q2.quantize that rotates, masks or quantizes columnwise, if the option
    `fuse_rotations` is on. Inductor's lowering decides whether each is fused with the producer of
    its operand, because it knows which operands are still expressions
    (lowering/prologue/fused_launches.py). It notes each decision in one list, which all marks
    share.

    Two quantizers with equal arguments whose operands come from the same tensors (du and dg of a
    gated MLP) may be one kernel:

    before                                       after
        du = mul(dh, silu(g))                        du = mul(dh, silu(g))
        a = quantize(du, scheme=S, ...)              dg = silu_backward(mul(dh, u), g)
        gemm(a...)                                   a = quantize(du, scheme=S, ...)
        dg = silu_backward(mul(dh, u), g)            gemm(a...)
        b = quantize(dg, scheme=S, ...)              b = quantize(dg, scheme=S, ...)

    The lowering of the first then knows both operands. If they are not fused, the order changes
    nothing: Inductor computes an expression where it is read.

    Precondition: it is the last pass, since the others replace such nodes.

    Exact: nothing is computed differently.
    """
    notes: list[str] = []
    found = {node: _made_from(node) for node, call in quantizers(graph) if _may_fuse(call)}
    readers: defaultdict[Storage, list[fx.Node]] = defaultdict(list)
    for node, own in found.items():
        for storage in own:
            readers[storage].append(node)
    for i, (first, own) in enumerate(found.items()):
        # Only those with a tensor in common are compared: in a deep model few of many.
        others = sorted({node for storage in own for node in readers[storage]} - {first})
        first.meta[MAY_FUSE] = notes
        first.meta[READS_THE_SAME] = any(mostly_in(own, found[other]) for other in others)
        for second in (other for other in others if first < other):
            if PAIR in first.meta or PAIR in second.meta or not _are_alike(first, second):
                continue
            same = mostly_in(own, found[second]) and mostly_in(found[second], own)
            if same and _moved_ahead(second, first):
                first.meta[PAIR] = second.meta[PAIR] = i
    return len(found)


def fusion_notes(graph: fx.Graph) -> list[str]:
    """The list that lowerings add to; empty where the pass has not run."""
    return next((node.meta[MAY_FUSE] for node in graph.nodes if MAY_FUSE in node.meta), [])


def _may_fuse(call: QuantizerCall) -> bool:
    """Whether a quantizer may compute its operand. Not rowwise ones without rotation or mask:
    Inductor kernels fuse already. Not grouped ones, whose kernel reads its operand."""
    return (
        call.spec.name == QUANTIZE
        and not call.grouped
        and (call.masked or call.rotated or call.columnwise)
    )


def _are_alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether two quantizers differ only in their operands (alike in size and type), seeds and
    rng_offset."""
    one, two = quantizer_of(first), quantizer_of(second)
    if one is None or two is None or one.masked or one.dbias is not None:
        return False
    (x, *of), (y, *same) = (
        (call.x.meta["val"], call.variant, call.scheme, call.transform) for call in (one, two)
    )
    return of == same and (x.dtype, x.shape) == (y.dtype, y.shape)


def _made_from(node: fx.Node) -> dict[Storage, int]:
    """The tensors that the element-wise expression of a quantizer's operand reads, with their
    bytes."""
    found: dict[Storage, int] = {}
    pending, seen = node.all_input_nodes[:1], set[fx.Node]()
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        if _is_element_by_element(at):
            pending += at.all_input_nodes
        else:
            found |= storages(at)
    return found


def mostly_in(one: dict[Storage, int], other: dict[Storage, int]) -> bool:
    """Whether half of the bytes of ``one`` are in ``other``. (RoPE's q and k share few, the
    tables.)"""
    common = sum(size for storage, size in one.items() if storage in other)
    return 0 < sum(one.values()) <= 2 * common


def _moved_ahead(second: fx.Node, first: fx.Node) -> bool:
    """Moves what `second` reads before `first`, if all of it computes element by element or picks a
    seed; otherwise returns False."""
    needed = needed_behind(second, first.prev, _may_move)
    if needed is None:
        return False
    for node in needed:
        first.prepend(node)
    return True


def _is_element_by_element(node: fx.Node) -> bool:
    tags: Any = getattr(node.target, "tags", ())
    draws = torch.Tag.nondeterministic_seeded in tags  # whose order is part of the program
    return bool(kind_of(node) & ELEMENTS) or (is_pointwise(node) and not draws)


def _may_move(node: fx.Node) -> bool:
    return _is_element_by_element(node) or node.target is torch.ops.aten.select.int  # a seed
