# SPDX-License-Identifier: Apache-2.0
"""q2::transpose on CUDA (transpose.cu): a weight in square blocks, which dgrad re-uses."""

import functools

import torch

from q2compile.runtime_kernels.cuda.calls import (
    BufferSlot,
    LaunchPlan,
    LaunchStep,
    OperandLayout,
    Output,
    launching,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.ops.transpose import checked_transpose, shapes

_THREADS, _TILE = 256, 128


@functools.cache
def transpose_launch(side: int, swizzled: bool) -> Launch:
    defines = {"Q2_SIDE": side, "Q2_SWIZZLED": int(swizzled)}
    return launch("transpose.cu", "PPPPiiiiiii", _THREADS, defines=defines)


@launching(
    "transpose",
    launches=lambda codes, scales, scheme, rows, swizzled=False: [
        transpose_launch(checked_transpose(scheme).width, swizzled)
    ],
    layouts={0: OperandLayout.ALIGNED, 1: OperandLayout.CONTIGUOUS},
)
def transpose(
    codes: torch.Tensor, scales: torch.Tensor, scheme: str, rows: int, swizzled: bool = False
) -> LaunchPlan:
    """See ops/transpose.py."""
    check_quantized("transpose", codes, scales, None)
    of_codes, of_scales = shapes(codes, scheme, rows, swizzled)
    (height, half), side = codes.shape, checked_transpose(scheme).width
    tiles_across = ceil_div(rows, _TILE)
    tiles = ceil_div(height, _TILE) * tiles_across
    sizes = height, half // 4, rows, of_codes[1] // 4, tiles_across, scales.shape[1]
    slots = (BufferSlot(0), BufferSlot(1), BufferSlot(2), BufferSlot(3))
    values = (*slots, *sizes, 2 * of_codes[1] // side)
    steps = (LaunchStep(transpose_launch(side, swizzled), (tiles, 1), values),) if tiles else ()
    return LaunchPlan(2, (Output(of_codes, torch.uint8), Output(of_scales, scales.dtype)), 0, steps)
