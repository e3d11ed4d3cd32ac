"""Block scales written as the fp4 tensor cores read them, by the op that makes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from q2compile.passes.graph_queries import (
    BOTH_ROTATED,
    ONE_ROTATED,
    depending_on_tangents,
    is_q2,
    is_served_by,
    q2_nodes,
    update_outputs,
)
from q2compile.passes.verify import named_arguments
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.transpose import of_rows
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, CUDA, TRITON_FP4

_QUANTISING = ("quantize", "quantize_masked", *ONE_ROTATED, *BOTH_ROTATED)
_MAKERS = (*_QUANTISING, "transpose")
# Of ops that read scales: which arguments those are, each with the one that names their scheme, and
# the kernels of the op that read them swizzled.
_READERS: dict[str, tuple[dict[int, int], tuple[str, ...]]] = {
    "gemm": ({1: 7, 4: 8}, (CUBLASLT_FP4, TRITON_FP4)),
    "requantize": ({1: 4}, (CUDA,)),
    "requantize_by_scales": ({1: 4}, (CUDA,)),
    "requantize_groups": ({1: 6}, (CUDA,)),
}


def swizzle_scales_pass(graph: fx.Graph) -> int:
    """An operand that nothing but fp4 GEMMs reads need not be swizzled by each of them.

    before                                            after
        a = rht_quantize(dy, s, S, R, False, 0)           a = rht_quantize(dy, s, S@32x4x4, R, ...)
        gemm(a[0], a[1], a[2], ..., S, ...)               gemm(a[0], a[1], a[2], ..., S@32x4x4, ...)

    Preconditions: all users of the scales are q2.gemm nodes that a kernel for fp4 tensor cores
    serves, and maybe requantisations whose CUDA kernel reads them swizzled, too; blocks have
    one row (those of 16x16 lie in rows of their own); and the CUDA kernel of the op writes swizzled
    scales of this scheme. A pair of directions has one scheme, so all must hold for both.

    Turned codes of 16x16 blocks, which GEMMs alone read, get a copy of their scales for each row,
    and are called what such an operand is:

        t = transpose(q, s, "nvfp4_16x16", n)             t = transpose(q, ..., n, True)
        gemm(..., t[0], t[1], ..., "nvfp4_16x16", ...)    gemm(..., "nvfp4@32x4x4", ...)

    Exact: the same numbers in other places.
    """
    return _swizzle(q2_nodes(graph, *_MAKERS))


def swizzle_saved_scales_pass(graph: fx.Graph) -> int:
    """The same for operands that the forward saves. Before the partitioner, since their readers
    stand in both graphs:

    before, in the joint graph                        after
        q = quantize(x, None, None, S, 0)                 q = quantize(x, None, None, S@32x4x4, 0)
        gemm(*q, ..., S, ...)                             gemm(*q, ..., S@32x4x4, ...)
        r = requantize(*q, s, S, ...)                     r = requantize(*q, s, S@32x4x4, ...)

    What the backward makes is left to the other pass, since gradients are paired between them.

    Preconditions and exactness as above.
    """
    backward = depending_on_tangents(graph)
    return _swizzle(node for node in q2_nodes(graph, *_MAKERS) if node not in backward)


def _swizzle(nodes: Iterable[fx.Node]) -> int:
    matches = 0
    for node in list(nodes):
        swizzled = _swizzled(node)
        scales = [u for u in node.users if u.target is operator.getitem and _index(u) % 3 == 1]
        readers = [(reader, output) for output in scales for reader in output.users]
        if swizzled is None or not any(is_q2(reader, "gemm") for reader, _ in readers):
            continue
        args, scheme = swizzled
        if not all(_served(*reader, scheme) for reader in readers):
            continue
        if not is_served_by(node.target, args, CUDA):
            continue
        node.args = args
        update_outputs(node)
        for reader, output in readers:
            reader.args = _with_swizzled(reader, _schemes_of(reader, output)[0], scheme)
        matches += 1
    return matches


def _swizzled(node: fx.Node) -> tuple[tuple[Any, ...], str] | None:
    """The op's arguments for swizzled scales, and the scheme of what comes out then; None where it
    makes no others or can't."""
    arguments: dict[str, Any] = named_arguments(node)
    scheme = arguments["scheme"]
    spec = get_scheme(scheme)
    if is_q2(node, "transpose"):
        return None if arguments.get("swizzled") else ((*node.args[:4], True), of_rows(scheme))
    if spec.swizzled or spec.widened or spec.block[0] > 1:
        return None
    at = list(arguments).index("scheme")
    return (*node.args[:at], scheme + SWIZZLED, *node.args[at + 1 :]), scheme + SWIZZLED


def _index(output: fx.Node) -> int:
    index = output.args[1]
    assert isinstance(index, int)
    return index


def _schemes_of(reader: fx.Node, scales: fx.Node) -> tuple[dict[int, int], tuple[str, ...]]:
    """The arguments of the reader that are these scales, with those that name their scheme; and
    the kernels that read them swizzled. None of either for another op."""
    for op, (places, kernels) in _READERS.items():
        if is_q2(reader, op):
            return {i: s for i, s in places.items() if reader.args[i] is scales}, kernels
    return {}, ()


def _with_swizzled(reader: fx.Node, places: dict[int, int], scheme: str) -> tuple[Any, ...]:
    """The reader's arguments, its schemes named as that of swizzled scales."""
    args: list[Any] = list(reader.args)
    for place in places.values():
        args[place] = scheme
    return tuple(args)


def _served(reader: fx.Node, scales: fx.Node, scheme: str) -> bool:
    places, kernels = _schemes_of(reader, scales)
    args = _with_swizzled(reader, places, scheme)
    return bool(places) and is_served_by(reader.target, args, *kernels)
