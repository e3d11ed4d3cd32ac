"""Block scales written as the fp4 tensor cores read them, by the op that makes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from q2compile.passes.graph_queries import (
    depending_on_tangents,
    is_q2,
    q2_nodes,
    serving_kernel,
    update_outputs,
)
from q2compile.passes.verify import named_arguments
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, CUDA, TRITON_FP4

_QUANTISING = ("quantize", "quantize_masked", "rht_quantize", "rht_quantize_both", "requantize")
# Which arguments of an op are scales, each with the one that names their scheme, and the kernels of
# the op that read them swizzled.
_GEMM, _REQUANTIZE = ({1: 7, 4: 8}, (CUBLASLT_FP4, TRITON_FP4)), ({1: 4}, (CUDA,))


def swizzle_scales_pass(graph: fx.Graph) -> int:
    """An operand that nothing but fp4 GEMMs reads need not be swizzled by each of them.

    before                                            after
        a = rht_quantize(dy, s, S, R, False, 0)           a = rht_quantize(dy, s, S@32x4x4, R, ...)
        gemm(a[0], a[1], a[2], ..., S, ...)               gemm(a[0], a[1], a[2], ..., S@32x4x4, ...)

    Preconditions: all users of the scales are q2.gemm nodes that a kernel for fp4 tensor cores
    serves, and maybe q2.requantize nodes whose CUDA kernel reads them swizzled, too; blocks have
    one row (those of 16x16 lie in rows of their own); and the CUDA kernel of the op writes swizzled
    scales of this scheme. A pair of directions has one scheme, so all must hold for both.

    Exact: the same numbers in other places.
    """
    return _swizzle(q2_nodes(graph, *_QUANTISING))


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
    return _swizzle(node for node in q2_nodes(graph, *_QUANTISING) if node not in backward)


def _swizzle(nodes: Iterable[fx.Node]) -> int:
    matches = 0
    for node in list(nodes):
        scales = [u for u in node.users if u.target is operator.getitem and _index(u) % 3 == 1]
        readers = [(reader, output) for output in scales for reader in output.users]
        at = list(named_arguments(node)).index("scheme")
        scheme: Any = node.args[at]
        spec = get_scheme(scheme)
        if spec.swizzled or spec.widened or spec.block[0] > 1:
            continue
        if not any(is_q2(reader, "gemm") for reader, _ in readers):
            continue
        args = (*node.args[:at], scheme + SWIZZLED, *node.args[at + 1 :])
        if serving_kernel(node.target, args) != CUDA or not all(
            _served(*reader) for reader in readers
        ):
            continue
        node.args = args
        update_outputs(node)
        for reader, output in readers:
            reader.args = _with_swizzled(reader, _schemes_of(reader, output)[0])
        matches += 1
    return matches


def _index(output: fx.Node) -> int:
    index = output.args[1]
    assert isinstance(index, int)
    return index


def _schemes_of(reader: fx.Node, scales: fx.Node) -> tuple[dict[int, int], tuple[str, ...]]:
    """The arguments of the reader that are these scales, with those that name their scheme; and
    the kernels that read them swizzled. None of either for another op."""
    if is_q2(reader, "gemm", "requantize"):
        places, kernels = _GEMM if is_q2(reader, "gemm") else _REQUANTIZE
        return {i: s for i, s in places.items() if reader.args[i] is scales}, kernels
    return {}, ()


def _with_swizzled(reader: fx.Node, places: dict[int, int]) -> tuple[Any, ...]:
    """The reader's arguments, its schemes named as of swizzled scales."""
    args: list[Any] = list(reader.args)
    for scheme in places.values():
        args[scheme] = args[scheme].removesuffix(SWIZZLED) + SWIZZLED
    return tuple(args)


def _served(reader: fx.Node, scales: fx.Node) -> bool:
    places, kernels = _schemes_of(reader, scales)
    return bool(places) and serving_kernel(reader.target, _with_swizzled(reader, places)) in kernels
