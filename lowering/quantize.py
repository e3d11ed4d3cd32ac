"""The lowering of `q2::quantize`: loops that fuse with the producer, instead of a kernel's call."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from q2compile import lowering
from q2compile.lowering import mxfp4, nvfp4, tiles
from q2compile.lowering.blocks import Blocks
from q2compile.runtime_kernels.registry import REFERENCE, serving
from q2compile.runtime_kernels.schemes import get_scheme

QUANTIZE = torch.ops.q2.quantize.default
_call = fallback_handler(QUANTIZE, add_to_fallback_set=False)


@register_lowering(QUANTIZE, type_promotion_kind=None)
def quantize(
    x: ir.TensorBox, amax: ir.TensorBox | None, seed: ir.TensorBox | None, name: str, stream: int
) -> Any:
    """See runtime_kernels/quantize/op.py."""
    lowered = lowering.why_not_lowered(x.get_device_or_error(), name) is None
    fuses = lowering.beats_kernels(name) and _computed(x)
    if not lowered or not (fuses or _served_by_reference_alone()):
        return _call(x, amax, seed, name, stream)
    tiles.install()
    scheme = get_scheme(name)
    blocks = Blocks(x, scheme.block)
    if scheme.format == "mxfp4":
        return mxfp4.quantize(blocks, scheme)
    if scheme.takes_amax:
        assert amax is not None, "the op's fake checks it"
        return nvfp4.quantize_exact(blocks, amax.make_loader(), scheme)
    return nvfp4.quantize_pow2(blocks, scheme)


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


def _served_by_reference_alone() -> bool:
    """Whether the registry has nothing for this node but the torch reference, dozens of kernels."""
    args = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in V.current_node.args]
    return serving("quantize", args).name == REFERENCE
