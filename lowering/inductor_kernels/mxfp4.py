# SPDX-License-Identifier: Apache-2.0
"""The rounding rules of `q2compile.runtime_kernels.numerics.mxfp4` in Inductor's IR: one kernel.
The global scale is a constant.

A block's scale is held as its e8m0 byte, an int32 in [0, 254).
"""

from __future__ import annotations

import torch
from torch._inductor.virtualized import ops

from q2compile.lowering.inductor_kernels import fp32
from q2compile.lowering.inductor_kernels.blocks import Index, PerBlock, ReducedBlocks
from q2compile.lowering.inductor_kernels.fp32 import Fp32, Value, integer, number
from q2compile.lowering.inductor_kernels.rounding import Quantized, Rounding
from q2compile.runtime_kernels.numerics.mxfp4 import ABOVE_HALF
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, Scheme

_LARGEST_BYTE = 253  # 2^126, whose reciprocal is normal
_NAN_BYTE = 0xFF


class _PowersOfTwo:
    """s = 2^(floor(log2 largest) - 2), or 2^ceil(log2(largest / 6)), whatever vmax is."""

    def __init__(self, fp: Fp32, largest: PerBlock, scheme: Scheme) -> None:
        self.fp, self.largest, self.shrink = fp, largest, scheme.shrink
        self.above = ABOVE_HALF if scheme.rceil else 0

    def code(self, place: Index, vmax: float) -> Value:
        exponent = fp32.shifted_right(ops.add(self.largest(place), integer(self.above)), 23)
        byte = ops.maximum(ops.sub(exponent, integer(2)), integer(0))
        return ops.minimum(byte, integer(_LARGEST_BYTE))

    def reciprocal(self, code: Value) -> Value:
        power = fp32.float_of(fp32.shifted_left(ops.sub(integer(254), code), 23))
        return ops.mul(power, number(self.shrink))

    def within(self, scaled: Value) -> Value:
        return ops.minimum(scaled, number(E2M1_MAX))


def quantize(blocks: ReducedBlocks, scheme: Scheme) -> Quantized:
    """Codes, e8m0 scales, NaN for poisoned blocks, and 1 / shrink as global scale."""
    largest = blocks.largest().make_loader()
    scales = _PowersOfTwo(blocks.fp, largest, scheme)
    rounding = Rounding(blocks, scheme, scales)
    codes = blocks.pack(rounding.code)

    def byte(place: Index) -> Value:
        finite = fp32.is_finite(largest(place))
        return ops.to_dtype(
            ops.where(finite, rounding.scale(place), integer(_NAN_BYTE)), torch.uint8
        )

    global_scale = blocks.scalar(torch.float32, lambda: number(1.0 / scheme.shrink))
    return codes, blocks.scales(byte, scheme), global_scale
