# SPDX-License-Identifier: Apache-2.0
"""Block scales written as the fp4 tensor cores read them, by the op that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from q2compile.graph.nodes import (
    choice_of,
    depending_on_tangents,
    is_q2,
    name_of,
    named_arguments,
    outputs_of,
    update_outputs,
)
from q2compile.graph.quantizers import quantizer_of
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import GEMM, TRANSPOSE
from q2compile.runtime_kernels.ops.transpose import of_rows
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, CUDA, TRITON_FP4, as_written

# The arguments of a GEMM that are scales, each with the one that names their scheme.
_SCALES_OF_GEMM = {"a_scales": "a_scheme", "b_scales": "b_scheme"}


def swizzle_scales_pass(graph: fx.Graph) -> int:
    """The quantizer of an operand that only fp4 GEMMs read writes swizzled scales, so that no GEMM
    has to swizzle them.

    before                                        after
        a = quantize(dy, scheme=S, ...)               a = quantize(dy, scheme=S@32x4x4, ...)
        gemm(a[0], a[1], a[2], ..., S, ...)           gemm(a[0], a[1], a[2], ..., S@32x4x4, ...)

    Preconditions:

    - The readers of the scales are q2.gemm nodes that a kernel for fp4 tensor cores serves, and
      requantizations whose CUDA kernel reads swizzled scales.
    - Blocks have one row (scales of 16x16 blocks have rows of their own).
    - The CUDA kernel of the op writes swizzled scales of this scheme. A rowwise and columnwise
      quantizer has one scheme, so all this must hold for both operands.

    Transposed 16x16 operands that only GEMMs read get their scales expanded per row, and are
    relabelled as 1x16:

        t = transpose(q, s, "nvfp4_16x16", n)             t = transpose(q, ..., n, True)
        gemm(..., t[0], t[1], ..., "nvfp4_16x16", ...)    gemm(..., "nvfp4@32x4x4", ...)

    Exact: the same scales in other places."""
    return _swizzle(graph.nodes)


def swizzle_saved_scales_pass(graph: fx.Graph) -> int:
    """Swizzle the scales of operands that the forward saves. This runs before the partitioner,
    since their readers are in both graphs:

    before, in the joint graph                    after
        q = quantize(x, scheme=S, ...)                q = quantize(x, scheme=S@32x4x4, ...)
        gemm(*q, ..., S, ...)                         gemm(*q, ..., S@32x4x4, ...)
        r = requantize(*q, source_scheme=S)           r = requantize(*q, source_scheme=S@32x4x4)

    What the backward makes is left to the other pass, since gradients are paired between them.

    Preconditions and exactness as above.
    """
    backward = depending_on_tangents(graph)
    return _swizzle(node for node in graph.nodes if node not in backward)


def _swizzle(nodes: Iterable[fx.Node]) -> int:
    matches = 0
    for node in list(nodes):
        swizzled = _swizzled(node)
        if swizzled is None:
            continue
        scales = [output for i, output in outputs_of(node).items() if i % 3 == 1]
        readers = [(reader, output) for output in scales for reader in output.users]
        if not any(is_q2(reader, GEMM) for reader, _ in readers):
            continue
        args, scheme = swizzled
        if not all(_served(*reader, scheme) for reader in readers):
            continue
        op = name_of(node.target)
        if choice_of(op, tuple(args.values())).name != CUDA:
            continue
        node.args, node.kwargs = as_written(op, args)
        update_outputs(node)
        for reader, output in readers:
            named, _ = _with_swizzled(reader, output, scheme)
            reader.args, reader.kwargs = as_written(name_of(reader.target), named)
        matches += 1
    return matches


def _swizzled(node: fx.Node) -> tuple[dict[str, Any], str] | None:
    """The op's arguments for swizzled scales, and the scheme of what comes out then; None where it
    makes no others or can't."""
    call = quantizer_of(node)
    if call is not None:
        if call.scheme.form or call.scheme.block[0] > 1 or not call.scheme.has_block_scales:
            return None
        scheme = call.scheme.with_form(SWIZZLED).name
        return dict(call.replace(scheme=scheme).args), scheme
    if not is_q2(node, TRANSPOSE):
        return None
    args = named_arguments(node)
    if args["swizzled"] or not get_scheme(str(args["scheme"])).has_block_scales:
        return None
    return {**args, "swizzled": True}, of_rows(str(args["scheme"]))


def _with_swizzled(
    reader: fx.Node, scales: fx.Node, scheme: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of an op that reads these scales, its schemes named as that of swizzled scales;
    and the kernels that read them so. None of either for an op that does not."""
    places: dict[str, str] = {}
    kernels: tuple[str, ...] = ()
    if is_q2(reader, GEMM):
        places, kernels = _SCALES_OF_GEMM, (CUBLASLT_FP4, TRITON_FP4)
    elif (call := quantizer_of(reader)) is not None and call.source_scheme is not None:
        places, kernels = {"scales": "source_scheme"}, (CUDA,)
    args = named_arguments(reader) if places else {}
    named = {of: scheme for at, of in places.items() if args[at] is scales}
    return ({**args, **named}, kernels) if named else ({}, ())


def _served(reader: fx.Node, scales: fx.Node, scheme: str) -> bool:
    args, kernels = _with_swizzled(reader, scales, scheme)
    return bool(args) and choice_of(name_of(reader.target), tuple(args.values())).name in kernels
