"""Quantisers of rows in groups that compute both halves of their operand, SwiGLU's dg and du side
by side, which a mixture of experts has as one gradient (fused_launches.py is of whole operands):

    before   triton_poi_fused_silu_backward.run(dh, u, g, buf0, ...)
             q2_site_0(buf0, offs, ends, seed, seed, buf1, buf2)
    after    q2_fused_0(dh, u, g, offs, ends, seed, seed, buf1, buf2)

The kernel is that of two operands, dh, u and g read once for both. Whether it is used is decided
where the concatenation is lowered, since that is written otherwise (concatenated.py)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V, ops

from q2compile.lowering import launches
from q2compile.lowering.fused_launches import Asked, FusedLaunches, quantised, refuse
from q2compile.lowering.producers import Found, NotProduced, producer_of
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import TILE
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE
from q2compile.runtime_kernels.registry import serving

_OP = torch.ops.q2.rht_quantize_groups_both.default
_NAME = "rht_quantize_groups_both"
# Of the graph that is lowered: by quantisers, what their operand is computed from.
_FOUND: WeakKeyDictionary[Any, dict[fx.Node, Found]] = WeakKeyDictionary()


def register() -> None:
    """In the place of launches.py's lowering."""
    register_lowering(_OP, type_promotion_kind=None)(launches.ending(_fused_or_not))


def in_the_quantiser(cat: fx.Node, inputs: Sequence[ir.TensorBox]) -> ir.TensorBox | None:
    """What stands for a concatenation that the quantiser that reads it will compute, and nobody
    else reads; None where one of the conditions says no, which is noted."""
    if len(cat.users) != 1:
        return None
    (reader,) = cat.users
    notes = reader.meta.get(MAY_FUSE)
    if notes is None or reader.target is not _OP:
        return None
    size = cat.meta["val"].shape
    label = f"{reader.name} ({_NAME} of {' x '.join(map(str, size))})"
    try:
        found = _halves(cat, reader, inputs)
    except NotProduced as reason:
        notes.append(f"{label}: not fused: {reason}")
        return None
    notes.append(f"{label}: fused with both halves of {cat.name}")
    _FOUND.setdefault(V.graph, {})[reader] = found
    first = inputs[0]
    rows, cols = first.get_size()
    zero = functools.partial(ops.constant, 0.0, first.get_dtype())
    return ir.Pointwise.create(
        device=first.get_device_or_error(),
        dtype=first.get_dtype(),
        inner_fn=lambda index: zero(),
        ranges=[rows, 2 * cols],
    )


def _halves(cat: fx.Node, reader: fx.Node, inputs: Sequence[ir.TensorBox]) -> Found:
    """Raises NotProduced where they cannot be computed in the kernel, or it would not pay."""
    parts: Any = cat.args[0]
    sizes = [tuple(part.meta["val"].shape) for part in parts]
    if V.graph.cpp_wrapper:
        raise NotProduced("generated code is in C++")
    if len(sizes) != 2 or sizes[0] != sizes[1] or cat.meta["val"].shape[0] != sizes[0][0]:
        raise NotProduced("its columns are no two halves")
    if not isinstance(sizes[0][1], int) or sizes[0][1] % TILE:
        raise NotProduced(f"halves of {sizes[0][1]} columns are no multiple of {TILE}")
    if any(len(part.users) > 1 for part in parts):
        raise NotProduced("a half has other readers")
    fakes = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in reader.args]
    if serving(_NAME, fakes).launching is None:
        raise NotProduced("no CUDA kernel of q2compile serves it here")
    found = producer_of(*inputs)
    found = found._replace(producer=dataclasses.replace(found.producer, halves=True))
    device = inputs[0].get_device_or_error()
    args = [... if isinstance(arg, fx.Node) else arg for arg in reader.args[1:]]
    refuse(_NAME, found.producer, device, args, reader)
    if device.type == "cuda":
        fused.prepare(_NAME, found.producer, args, device.index)
    return found


def _fused_or_not(x: ir.TensorBox, *args: Any) -> Any:
    found = _FOUND.get(V.graph, {}).pop(V.current_node, None)
    if found is None:
        return launches.call(_OP, x, *args)
    made = quantised(_OP, Asked(V.current_node, x, args))
    made.make_buffers()
    FusedLaunches(_NAME, found, [made])
    return made.outputs
