# SPDX-License-Identifier: Apache-2.0
"""An Inductor kernel for `q2::quantize`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from q2compile.lowering import launches
from q2compile.lowering.inductor_kernels import fp8, nvfp4
from q2compile.lowering.inductor_kernels.blocks import ReducedBlocks
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.lowering.inductor_kernels.nvfp4 import Quantized
from q2compile.lowering.member import OpCall
from q2compile.runtime_kernels.ops.table import QuantizerCall


def inductor_kernel(asked: OpCall) -> Any:
    """The outputs of a quantizer as an Inductor kernel, fused with the producer of x."""
    call = asked.quantizer
    if call.scheme.is_tensorwise:
        return fp8.quantize(call)
    return _recorded(call) if call.recorded else _by_inductor(call)


def _recorded(call: QuantizerCall) -> Any:
    """The Inductor kernel is that of the call without recording. The statistics read a copy of x,
    computed by a kernel that nothing is fused with. So the other kernels of the graph, and their
    roundings, are those of the graph without recording."""
    parts = _by_inductor(call)
    args = (_apart(call.x), *parts, call.scheme.name)
    return *parts, launches.launches_of(torch.ops.q2.statistics_of_operand.default, *args)


def _apart(x: ir.TensorBox) -> ir.TensorBox:
    """x in a buffer of its own; other readers of x are not affected."""
    copy = ir.Pointwise.create(
        device=x.get_device_or_error(),
        dtype=x.get_dtype(),
        inner_fn=x.make_loader(),
        ranges=list(x.get_size()),
    )
    copy.realize()
    V.graph.no_fuse_buffer_names.add(copy.get_name())
    return copy


def _by_inductor(call: QuantizerCall) -> Quantized:
    scheme, amax = call.scheme, call.args["amax"]
    blocks = ReducedBlocks(call.x, scheme.block)
    if amax is not None:
        return nvfp4.quantize_exact(blocks, amax.make_loader(), scheme)
    return nvfp4.quantize_pow2(blocks, scheme)


def computed_operand(x: ir.TensorBox) -> ComputedOperand | None:
    """The expression that computes x, if x is not in memory and it is more than a cast, so that
    there is something to fuse with. For a buffer, a CUDA kernel is as fast and costs no time in
    Inductor; for a weight's cast that time does not pay either."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    if not isinstance(data, ir.Pointwise):
        return None
    count = data.inner_fn_opcount()
    if not count.used_ops - {"load", "to_dtype", "constant"}:
        return None
    elements = max(_hint(x), 1)
    read = [V.graph.get_buffer(name) for name in count.read_buffers]
    bytes_read = sum(b.get_dtype().itemsize * min(_hint(b) / elements, 1.0) for b in read)
    return ComputedOperand(float(count.num_ops), round(bytes_read, 2))


def _hint(x: Any) -> int:
    """The number of elements, by the hints of sizes that are symbols."""
    sizes = (V.graph.sizevars.optimization_hint(size, fallback=1) for size in x.get_size())
    return math.prod(map(int, sizes))
