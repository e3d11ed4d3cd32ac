# SPDX-License-Identifier: Apache-2.0
"""Quantizers write dequantized bf16 operands for bf16 GEMMs if there are no fp4 tensor cores."""

from __future__ import annotations

from typing import Any

from torch import fx

from q2compile.graph.gemms import OPERANDS
from q2compile.graph.nodes import GEMM_OPS, choice_of, is_q2, name_of, update_outputs
from q2compile.graph.quantizers import is_forward_operand, quantizers, set_call
from q2compile.graph.views import behind
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CUDA, CUDA_BF16

_LARGE = 2**24  # elements


def dequantize_operands_pass(graph: fx.Graph) -> int:
    """An operand that only bf16 GEMMs read is written dequantized, not as codes.

    before                                        after
        a = quantize(dy, scheme=S, ...)               a = quantize(dy, scheme=S@bf16, ...)
        gemm(a[0], a[1], a[2], ..., S, ...)           gemm(a[0], a[1], a[2], ..., S@bf16, ...)

    Otherwise a kernel before the GEMM reads the codes (.56 bytes per element) and writes bf16 (2
    bytes), which the GEMM then reads. Now the quantizer writes bf16 itself.

    Preconditions:

    - Only q2.gemm (or q2.grouped_gemm) nodes read the op's outputs, and the CUDA kernel for bf16
      tensor cores serves them.
    - The CUDA kernel of the op writes dequantized operands of this scheme and transform. A rowwise
      and columnwise quantizer has one scheme, so both must meet the conditions.
    - Unrotated operands of fprop: graph inputs only. Other quantizers may fuse into their producer,
      as Inductor kernels. The graph inputs are weights whose codes and scales no backward reads,
      because it recomputes them (recompute_weights): a kernel that writes codes as well takes a
      tenth longer. Small ones share a launch with the codes of x instead, which saves more.

    Exact: code * scale has 6 significant bits, and the GEMM multiplies the same values."""
    matches = 0
    for node, call in list(quantizers(graph)):
        readers = {gemm for output in node.users for gemm in output.users}
        if call.masked or (_may_be_lowered(call) and not _is_large_input(call.x)):
            continue
        if call.scheme.form or not readers or not all(_is_bf16(gemm) for gemm in readers):
            continue
        scheme = call.scheme.with_form(DEQUANTIZED).name
        call = call.replace(scheme=scheme)
        if choice_of(call.spec.name, call.positional).name != CUDA:
            continue
        set_call(node, call)
        update_outputs(node)
        for gemm in readers:
            for codes, of_scheme in OPERANDS:
                operand = gemm.args[codes]
                if operand in node.users:
                    gemm.update_arg(of_scheme, scheme)
        matches += 1
    return matches


def _may_be_lowered(call: QuantizerCall) -> bool:
    """Whether Inductor may make a kernel of the quantizer that fuses with what computes x."""
    return is_forward_operand(call) and not call.rotated


def _is_large_input(x: Any) -> bool:
    """Whether x is an input of the graph, or a view of one."""
    size = x.meta["val"].numel()
    return behind(x).op == "placeholder" and isinstance(size, int) and size >= _LARGE


def _is_bf16(node: fx.Node) -> bool:
    if not is_q2(node, *GEMM_OPS):
        return False
    return choice_of(name_of(node.target), node.args).name == CUDA_BF16
