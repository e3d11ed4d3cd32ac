# SPDX-License-Identifier: Apache-2.0
"""Grouped quantizers that compute both parts of their operand: SwiGLU's dg and du side by side, the
gradient of gate and up, which experts have as one tensor (fused_launches.py fuses whole operands):

    before   triton_poi_fused_silu_backward.run(dh, u, g, buf0, ...)
             q2_site_0(buf0, offs, ends, seed, seed, buf1, buf2)
    after    q2_fused_0(dh, u, g, offs, ends, seed, seed, buf1, buf2)

The kernel is that of two operands, and reads dh, u and g once for both. The decision is made when
the concatenation is lowered, because otherwise the concatenation is written (concatenated.py)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor import ir
from torch._inductor.virtualized import V, ops
from torch.fx.node import map_arg

from q2compile.lowering.member import OpCall
from q2compile.lowering.prologue.expressions import CannotFuse, Prologue, prologue_of
from q2compile.lowering.prologue.fused_launches import (
    FusedLaunches,
    QuantizerNode,
    quantized,
    raise_unless_it_pays,
)
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import TILE
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall, quantizer_of
from q2compile.runtime_kernels.registry import serving


def fused_concatenation(cat: fx.Node, inputs: Sequence[ir.TensorBox]) -> ir.TensorBox | None:
    """A placeholder for a concatenation that its only reader, a quantizer, will compute; None if a
    condition fails, with the reason noted."""
    if len(cat.users) != 1:
        return None
    (reader,) = cat.users
    notes, call = reader.meta.get(MAY_FUSE), quantizer_of(reader)
    if notes is None or call is None or not call.grouped or call.recorded:
        return None
    size = cat.meta["val"].shape
    label = f"{reader.name} ({call.label} of {' x '.join(map(str, size))})"
    try:
        found = _computed_in_quantizer(cat, reader, call, inputs)
    except CannotFuse as reason:
        notes.append(f"{label}: not fused: {reason}")
        return None
    notes.append(f"{label}: fused with gate and up of {cat.name}")
    lowering_state().gate_and_up[reader] = found
    first = inputs[0]
    rows, cols = first.get_size()
    zero = functools.partial(ops.constant, 0.0, first.get_dtype())
    return ir.Pointwise.create(
        device=first.get_device_or_error(),
        dtype=first.get_dtype(),
        inner_fn=lambda index: zero(),
        ranges=[rows, 2 * cols],
    )


def _computed_in_quantizer(
    cat: fx.Node, reader: fx.Node, call: QuantizerCall, inputs: Sequence[ir.TensorBox]
) -> Prologue:
    """The prologue of gate and up. Raises CannotFuse if the kernel can't compute them, or it would
    not pay."""
    parts: Any = cat.args[0]
    sizes = [tuple(part.meta["val"].shape) for part in parts]
    if V.graph.cpp_wrapper:
        raise CannotFuse("generated code is in C++")
    if len(sizes) != 2 or sizes[0] != sizes[1] or cat.meta["val"].shape[0] != sizes[0][0]:
        raise CannotFuse("its columns are not two equal parts")
    if not isinstance(sizes[0][1], int) or sizes[0][1] % TILE:
        raise CannotFuse(f"parts of {sizes[0][1]} columns, not a multiple of {TILE}")
    if any(len(part.users) > 1 for part in parts):
        raise CannotFuse("a part has other readers")
    if serving(QUANTIZE, map_arg(call.positional, lambda n: n.meta["val"])).launching is None:
        raise CannotFuse("no CUDA kernel of q2compile serves it here")
    found = prologue_of(*inputs)
    found = found._replace(expression=dataclasses.replace(found.expression, gate_and_up=True))
    device = inputs[0].get_device_or_error()
    tensors = {name: ... for name, a in call.args.items() if isinstance(a, fx.Node) and name != "x"}
    quantizer = call.replace(**tensors)
    raise_unless_it_pays(found.expression, QuantizerNode(reader, quantizer))
    if device.type == "cuda":
        fused.prepare(found.expression, quantizer.written()[1], device.index)
    return found


def gate_and_up(call: OpCall) -> tuple[Any, ...] | None:
    """The outputs of the quantizer that is lowered, if it computes gate and up of its operand; else
    None."""
    found = lowering_state().gate_and_up.pop(V.current_node, None)
    if found is None:
        return None
    made = quantized(QuantizerNode(V.current_node, call.quantizer))
    made.make_buffers()
    FusedLaunches(found, [made])
    return made.outputs
