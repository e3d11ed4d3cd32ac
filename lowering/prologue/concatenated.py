# SPDX-License-Identifier: Apache-2.0
"""Concatenations that a quantizer reads: one kernel writes all parts.

On a GPU Inductor lowers `cat([dg, du], 1)` to a kernel over the result. For each element it
computes both parts and selects one, since each part has no other reader. For SwiGLU's backward that
is two exponentials and two quotients per element, and six loads where three would do:

    before   triton_poi_cat(dh, u, g, buf0)       62 instructions per element of [T, 2 I]
    after    triton_poi(dh, u, g, buf0, buf0')    21, over [T, I]; each part is stored in its place

(sm_90a, examples/benchmarks/KERNEL_LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.virtualized import V

from q2compile.graph.node_meta import MAY_FUSE
from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.views import RESHAPE, readers
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.torch_internals.patches import replaces

_aten = torch.ops.aten


@replaces("cat")
def lowering_of_cat(own: Any) -> Any:
    """The lowering of a cat that a quantizer reads; for all others ``own``."""

    def cat(inputs: Any, dim: int = 0) -> Any:
        node = V.current_node
        if node.target is not _aten.cat.default:  # another lowering's call of this one
            return own(inputs, dim)
        if _is_read_by_calls(node) and _fuse_into_one_kernel(inputs):
            rank = len(inputs[0].get_size())
            return ir.TensorBox(ir.ConcatKernel.create(inputs, dim % rank))
        return own(inputs, dim)

    return cat


def _is_read_by_calls(node: fx.Node) -> bool:
    """Whether only such quantizers read the tensor, through views, and none of them may compute it
    in its prologue (fused_launches.py)."""
    found = list(readers(node, RESHAPE))
    return bool(found) and all(map(_is_kernel_call, found))


def _is_kernel_call(node: fx.Node) -> bool:
    """Whether a node is a quantizer that is never an Inductor kernel, and that does not compute
    this operand in its prologue."""
    call = quantizer_of(node)
    if call is None or call.spec.name != QUANTIZE or call.recorded or call.dbias is not None:
        return False
    return call.grouped or (len(call.operands) > 1 and MAY_FUSE not in node.meta)


def _fuse_into_one_kernel(inputs: Any) -> bool:
    """Whether all parts are expressions of one dtype and size that read a tensor in common, so that
    Inductor's scheduler fuses them into one kernel."""
    first = inputs[0]
    alike = all(
        x.get_dtype() == first.get_dtype() and list(x.get_size()) == list(first.get_size())
        for x in inputs
    )
    if len(inputs) < 2 or not alike or not all(map(_is_expression, inputs)):
        return False
    return bool(set.intersection(*(set(x.get_read_names()) for x in inputs)))


def _is_expression(x: Any) -> bool:
    while isinstance(x, ir.MutableBox | ir.BaseView):
        x = x.data
    return isinstance(x, ir.Pointwise)
