"""The lowering of `q2::quantize`: not a call of a kernel, but loops that fuse with their producer."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from q2compile import lowering
from q2compile.lowering import nvfp4, tiles
from q2compile.runtime_kernels.schemes import get_scheme

QUANTIZE = torch.ops.q2.quantize.default


@register_lowering(QUANTIZE, type_promotion_kind=None)
def quantize(
    x: ir.TensorBox, amax: ir.TensorBox | None, seed: ir.TensorBox | None, name: str, stream: int
) -> Any:
    """See runtime_kernels/quantize/op.py."""
    scheme = get_scheme(name)
    if lowering.why_not_lowered(x.get_device(), name) is not None:
        return fallback_handler(QUANTIZE, add_to_fallback_set=False)(x, amax, seed, name, stream)
    tiles.install()
    if scheme.takes_amax:
        assert amax is not None, "the op's fake checks it"
        return nvfp4.quantize_exact(x, amax, scheme)
    return nvfp4.quantize_pow2(x, scheme)
