# SPDX-License-Identifier: Apache-2.0
"""Block scales as the fp4 tensor cores read them: the 32x4x4 layout (numerics/swizzle.py).

Quantizers write them so for operands that only GEMMs and requantizations read (pass
swizzle_scales). For others swizzle_scales.cu does it ahead of the product, over 1/16 of the
elements:

    weights in square blocks (nvfp4, mxfp4_2d): they are saved for backward with one scale for 16 or
        32 rows. Tensor cores read a copy of it for each row; q2::transpose writes these for dgrad
    codes that are inputs of a graph (option cache_weights)
    operands that dequantize, grouped_gemm or the caller of the graph reads as well
    calls outside of a compiled graph
"""

import functools

import torch

from q2compile.runtime_kernels.cuda.calls import (
    BufferSlot,
    Launching,
    LaunchPlan,
    LaunchStep,
    OperandLayout,
    Output,
)
from q2compile.runtime_kernels.cuda.gemm.operands import aligned
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.gemm import Factor

THREADS = 256


@functools.cache
def swizzle_launch() -> Launch:
    return launch("swizzle_scales.cu", "PPiiiii", THREADS, defines={})


def swizzled(factor: Factor) -> torch.Tensor:
    """The scales of an operand in the 32x4x4 layout, flat, padded with zeros, at an aligned
    address; those of square blocks are repeated for each of their rows. A scheme that has them so
    already keeps them, unless they are a view that begins anywhere."""
    if factor.spec.swizzled:
        return aligned(factor.scales.flatten())
    return _swizzled(factor.scales, factor.codes.shape[0], factor.spec.block[0])


def _swizzle_call(scales: torch.Tensor, rows: int, height: int) -> LaunchPlan:
    blocks = scales.shape[1]
    tiles_across = ceil_div(blocks, 4)
    words = ceil_div(rows, 128) * tiles_across * 128
    shift = height.bit_length() - 1  # blocks of 1, 16 or 32 rows
    values = (BufferSlot(0), BufferSlot(1), rows, blocks, shift, tiles_across, words)
    grid = ceil_div(words, THREADS), 1
    output = Output((4 * words,), scales.dtype)
    return LaunchPlan(1, (output,), 0, (LaunchStep(swizzle_launch(), grid, values),))


_swizzled = Launching(_swizzle_call, {0: OperandLayout.CONTIGUOUS})
