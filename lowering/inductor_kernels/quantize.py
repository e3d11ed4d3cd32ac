# SPDX-License-Identifier: Apache-2.0
"""An Inductor kernel for `q2::quantize`: the step of its lowering, and when it is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from q2compile.graph.nodes import choice_of
from q2compile.graph.quantizers import quantizer_of
from q2compile.lowering import launches
from q2compile.lowering.inductor_kernels import fp8, mxfp4, nvfp4, selfcheck, support
from q2compile.lowering.inductor_kernels.blocks import ReducedBlocks
from q2compile.lowering.inductor_kernels.rounding import Quantized
from q2compile.lowering.member import OpCall
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import CPP, REFERENCE


def inductor_kernel(asked: OpCall) -> Any:
    """The outputs of a quantizer as an Inductor kernel, fused with the producer of x; None if there
    is none, or a CUDA kernel is better."""
    call = asked.quantizer
    if not _lowered(call):
        return None
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
    if scheme.format == "mxfp4":
        return mxfp4.quantize(blocks, scheme)
    if amax is not None:
        return nvfp4.quantize_exact(blocks, amax.make_loader(), scheme)
    return nvfp4.quantize_pow2(blocks, scheme)


def _lowered(call: QuantizerCall) -> bool:
    x, device = call.x, call.x.get_device_or_error()
    if support.why_not_lowered(device, call) is not None:
        return False
    if any(V.graph.sizevars.statically_known_equals(size, 0) for size in x.get_size()):
        return False  # there is no largest element
    fuses = support.beats_kernels(call) and _computed(x)
    if not fuses and not _served_by_reference_alone():
        return False
    return selfcheck.rejection(device, call) is None


def _computed(x: ir.TensorBox) -> bool:
    """Whether x is still an expression, and more than a cast: something to fuse with. For a buffer,
    a CUDA kernel is as fast and costs no time in Inductor; for a weight's cast that time does not
    pay either."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    return isinstance(data, ir.Pointwise) and bool(
        data.inner_fn_opcount().used_ops - {"load", "to_dtype", "constant"}
    )


def _served_by_reference_alone() -> bool:
    """Whether the registry has only the torch reference for this node, which is dozens of kernels;
    or a kernel for a CPU, where only tests lower it."""
    call = quantizer_of(V.current_node)
    assert call is not None
    args = call.replace(recorded=False).positional
    return choice_of(QUANTIZE, args).name in (CPP, REFERENCE)
