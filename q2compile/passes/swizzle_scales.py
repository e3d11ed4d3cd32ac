"""Block scales written as the fp4 tensor cores read them, by the op that makes them."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from q2compile.passes.graphs import is_q2, q2_nodes
from q2compile.passes.spec import named_arguments
from q2compile.runtime_kernels.cuda.gemm import FP4
from q2compile.runtime_kernels.cuda.rotation import NAME as CUDA
from q2compile.runtime_kernels.layout import scales_shape
from q2compile.runtime_kernels.registry import serving
from q2compile.runtime_kernels.schemes import SWIZZLED, get_scheme

_SCALES, _SCHEMES = (1, 4), (7, 8)  # arguments of q2.gemm, of a and b


def swizzle_scales_pass(graph: fx.Graph) -> int:
    """An operand that nothing but fp4 GEMMs reads need not be swizzled by each of them.

    before                                            after
        a = rht_quantize(dy, s, S, R, False, 0)           a = rht_quantize(dy, s, S@32x4x4, R, ...)
        gemm(a[0], a[1], a[2], ..., S, ...)               gemm(a[0], a[1], a[2], ..., S@32x4x4, ...)

    Preconditions: all users of the scales are q2.gemm nodes that cuBLASLt's fp4 kernel serves, and
    the CUDA kernel of the op writes swizzled scales of this scheme and transform; a pair of
    directions has one scheme, so both must be so.

    Exact: the same numbers in other places.
    """
    matches = 0
    for node in list(q2_nodes(graph, "rht_quantize", "rht_quantize_both", "requantize")):
        scales = [u for u in node.users if u.target is operator.getitem and _index(u) % 3 == 1]
        readers = [(gemm, output) for output in scales for gemm in output.users]
        if not readers or not all(_is_fp4(gemm) for gemm, _ in readers):
            continue
        at = list(named_arguments(node)).index("scheme")
        scheme: Any = node.args[at]
        if scheme.endswith(SWIZZLED):
            continue
        args = (*node.args[:at], scheme + SWIZZLED, *node.args[at + 1 :])
        if _kernel(node, args) != CUDA:
            continue
        node.args = args
        for gemm, output in readers:
            _reads_swizzled(gemm, output)
        for output in scales:
            _swizzle_meta(node, output, scheme)
        matches += 1
    return matches


def _index(output: fx.Node) -> int:
    index = output.args[1]
    assert isinstance(index, int)
    return index


def _is_fp4(node: fx.Node) -> bool:
    return is_q2(node, "gemm") and _kernel(node, node.args) == FP4


def _kernel(node: fx.Node, args: Any) -> str:
    name = node.target.name().partition("::")[2]  # type: ignore[union-attr]
    return serving(name, map_arg(args, lambda n: n.meta["val"])).name


def _reads_swizzled(gemm: fx.Node, scales: fx.Node) -> None:
    for operand, scheme in zip(_SCALES, _SCHEMES, strict=True):
        name: Any = gemm.args[scheme]
        if gemm.args[operand] is scales and not name.endswith(SWIZZLED):
            gemm.update_arg(scheme, name + SWIZZLED)


def _swizzle_meta(node: fx.Node, output: fx.Node, scheme: str) -> None:
    """The shape of swizzled scales, where the graph says what comes out of the op."""
    plain = output.meta["val"]
    rows, blocks = plain.shape
    shape = scales_shape(rows, blocks, get_scheme(scheme + SWIZZLED))
    output.meta["val"] = plain.new_empty(shape)
    outputs = list(node.meta["val"])
    outputs[_index(output)] = output.meta["val"]
    node.meta["val"] = tuple(outputs)
