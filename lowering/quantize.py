"""The lowerings of `q2::quantize`, its recorded form, and `q2::rht_quantize`: loops that fuse with
the producer, instead of a kernel's call."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from q2compile.lowering import (
    fused_launches,
    launches,
    mxfp4,
    nvfp4,
    selfcheck,
    support,
)
from q2compile.lowering.blocks import Blocks, PerBlock, largest_of_all
from q2compile.lowering.fp32 import float_of
from q2compile.lowering.reduction_blocks import ReducedBlocks
from q2compile.lowering.register_blocks import Draws, HeldBlocks
from q2compile.lowering.rounding import Quantized
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.registry import REFERENCE, serving

QUANTIZE = torch.ops.q2.quantize.default
QUANTIZE_RECORDED = torch.ops.q2.quantize_recorded.default
RHT_QUANTIZE = torch.ops.q2.rht_quantize.default


@register_lowering(QUANTIZE, type_promotion_kind=None)
@launches.ending
def quantize(
    x: ir.TensorBox, amax: ir.TensorBox | None, seed: ir.TensorBox | None, name: str, stream: int
) -> Any:
    """See runtime_kernels/ops/quantize.py."""
    if not _lowered("quantize", x, name, "none"):
        return launches.call(QUANTIZE, x, amax, seed, name, stream)
    return _quantize(x, amax, seed, name, stream)


@register_lowering(QUANTIZE_RECORDED, type_promotion_kind=None)
@launches.ending
def quantize_recorded(
    x: ir.TensorBox, amax: ir.TensorBox | None, seed: ir.TensorBox | None, name: str, stream: int
) -> Any:
    """See runtime_kernels/ops/recorded.py. The loops are those of `quantize`, over x as it stands;
    what statistics read is x once more, computed by a kernel of its own that nothing is fused with,
    so that the other kernels of the graph, and what they round, are those of the graph without it.
    """
    if not _lowered("quantize", x, name, "none"):
        return launches.call(QUANTIZE_RECORDED, x, amax, seed, name, stream)
    parts = _quantize(x, amax, seed, name, stream)
    args = (_apart(x), *parts, name)
    return *parts, launches.call(torch.ops.q2.statistics_of_operand.default, *args)


def _apart(x: ir.TensorBox) -> ir.TensorBox:
    """x in a buffer of its own; what else reads x still computes it, or reads what it read."""
    copy = ir.Pointwise.create(
        device=x.get_device_or_error(),
        dtype=x.get_dtype(),
        inner_fn=x.make_loader(),
        ranges=list(x.get_size()),
    )
    copy.realize()
    V.graph.no_fuse_buffer_names.add(copy.get_name())
    return copy


def _quantize(
    x: ir.TensorBox, amax: ir.TensorBox | None, seed: ir.TensorBox | None, name: str, stream: int
) -> Quantized:
    scheme = get_scheme(name)
    load_amax = _loader(amax)
    if scheme.stochastic:
        draws = Draws(_loader(seed), stream)
        held = HeldBlocks(x, scheme, get_transform("none"), draws, transpose=False)
        return _rounded(held, load_amax, scheme)
    return _rounded(ReducedBlocks(x, scheme.block), load_amax, scheme)


@register_lowering(RHT_QUANTIZE, type_promotion_kind=None)
@launches.ending
def rht_quantize(
    x: ir.TensorBox,
    seed: ir.TensorBox | None,
    name: str,
    transform: str,
    transpose: bool,
    stream: int,
) -> Any:
    """See runtime_kernels/ops/rht_quantize.py."""
    args = (seed, name, transform, transpose, stream)
    fused = fused_launches.call(RHT_QUANTIZE, x, *args)
    if fused is not None:
        return fused
    if not _lowered("rht_quantize", x, name, transform, transpose):
        return launches.call(RHT_QUANTIZE, x, *args)
    scheme = get_scheme(name)
    draws = Draws(_loader(seed), stream)
    blocks = HeldBlocks(x, scheme, get_transform(transform), draws, transpose=transpose)
    load_amax: PerBlock | None = None
    if scheme.takes_amax:
        worst = largest_of_all(blocks.largest_if_finite())
        load_amax = blocks.scalar(torch.float32, lambda: float_of(worst([]))).make_loader()
    return _rounded(blocks, load_amax, scheme)


def _rounded(blocks: Blocks, load_amax: PerBlock | None, scheme: Scheme) -> Quantized:
    if scheme.format == "mxfp4":
        return mxfp4.quantize(blocks, scheme)
    if load_amax is not None:
        return nvfp4.quantize_exact(blocks, load_amax, scheme)
    return nvfp4.quantize_pow2(blocks, scheme)


def _loader(scalar: ir.TensorBox | None) -> PerBlock | None:
    return None if scalar is None else scalar.make_loader()


def _lowered(
    op: str, x: ir.TensorBox, scheme: str, transform: str, transpose: bool = False
) -> bool:
    device = x.get_device_or_error()
    if support.why_not_lowered(device, scheme, transform) is not None:
        return False
    if any(V.graph.sizevars.statically_known_equals(size, 0) for size in x.get_size()):
        return False  # there is no largest number
    fuses = support.beats_kernels(scheme, transform) and _computed(x)
    if not fuses and not _served_by_reference_alone(op):
        return False
    return selfcheck.refusal(op, device, scheme, transform, transpose) is None


def _computed(x: ir.TensorBox) -> bool:
    """Whether x is still an expression, and more than a cast: something to fuse with. For a buffer
    a kernel of our own is as fast, and takes Inductor no time to compile; a weight's cast is not
    worth that time either."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    return isinstance(data, ir.Pointwise) and bool(
        data.inner_fn_opcount().used_ops - {"load", "to_dtype", "constant"}
    )


def _served_by_reference_alone(op: str) -> bool:
    """Whether the registry has nothing for this node but the torch reference, dozens of kernels."""
    args = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in V.current_node.args]
    return serving(op, args).name == REFERENCE
