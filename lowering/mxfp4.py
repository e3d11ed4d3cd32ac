"""The rounding rules of `q2compile.runtime_kernels.mxfp4`, in Inductor's loops: one kernel, and the
global scale, which says whether all of x is finite.

A block's scale is held as its e8m0 byte, an int32 in [0, 254).
"""

from __future__ import annotations

import torch
from torch._inductor.virtualized import ops

from q2compile.lowering import fp32
from q2compile.lowering.blocks import Blocks, Index, PerBlock, largest_of_all
from q2compile.lowering.fp32 import Fp32, Value, integer, number
from q2compile.lowering.rounding import Quantized, Rounding
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, Scheme

_LARGEST_BYTE = 253  # 2^126, whose reciprocal is normal


class _PowersOfTwo:
    """s = 2^(floor(log2 largest) - 2), whatever vmax is."""

    def __init__(self, fp: Fp32, largest: PerBlock, shrink: float) -> None:
        self.fp, self.largest, self.shrink = fp, largest, shrink

    def code(self, place: Index, vmax: float) -> Value:
        exponent = fp32.shifted_right(self.largest(place), 23)
        byte = ops.maximum(ops.sub(exponent, integer(2)), integer(0))
        return ops.minimum(byte, integer(_LARGEST_BYTE))

    def reciprocal(self, code: Value) -> Value:
        power = fp32.float_of(fp32.shifted_left(ops.sub(integer(254), code), 23))
        return ops.mul(power, number(self.shrink))

    def within(self, scaled: Value) -> Value:
        return ops.minimum(scaled, number(E2M1_MAX))


def quantize(blocks: Blocks, scheme: Scheme) -> Quantized:
    """Codes, e8m0 scales, and 1 / shrink as global scale: NaN where x is not finite."""
    largest = blocks.largest()
    scales = _PowersOfTwo(Fp32(blocks.device), largest.make_loader(), scheme.shrink)
    rounding = Rounding(blocks, scheme, scales)
    codes = blocks.pack(rounding.code)
    scale_bytes = blocks.scales(
        lambda place: ops.to_dtype(rounding.scale(place), torch.uint8), scheme
    )
    worst = largest_of_all(largest)

    def global_scale() -> Value:
        finite = ops.lt(worst([]), integer(fp32.INFINITE))
        return ops.where(finite, number(1.0 / scheme.shrink), number(float("nan")))

    unit = blocks.scalar(torch.float32, global_scale)
    return codes, scale_bytes, unit
