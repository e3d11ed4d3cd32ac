# SPDX-License-Identifier: Apache-2.0
"""q2::transpose on CUDA, of codes that the backward uses again: in square blocks (transpose.cu) or
of scheme fp8 (transposable.cu)."""

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
from q2compile.runtime_kernels.cuda.quantize.transposable import code_launches, transposing_plan
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.ops.transpose import checked_transpose, shapes

_THREADS, _TILE = 256, 128


@functools.cache
def transpose_launch(side: int, swizzled: bool) -> Launch:
    defines = {"Q2_SIDE": side, "Q2_SWIZZLED": int(swizzled)}
    return launch("transpose.cu", "PPPPiiiiiii", _THREADS, defines=defines)


def _launches(codes, scales, scheme: str, rows, swizzled: bool = False) -> list[Launch]:
    spec = checked_transpose(scheme)
    if spec.is_tensorwise:
        return code_launches(spec.codes_dtype, False, True)
    return [transpose_launch(spec.width, swizzled)]


@launching(
    "transpose",
    launches=_launches,
    layouts={0: OperandLayout.ALIGNED, 1: OperandLayout.CONTIGUOUS},
)
def transpose(
    codes: torch.Tensor, scales: torch.Tensor, scheme: str, rows: int, swizzled: bool = False
) -> LaunchPlan:
    """See ops/transpose.py."""
    spec = checked_transpose(scheme)
    check_quantized("transpose", codes, scales, None, dtype=spec.codes_dtype)
    if spec.is_tensorwise:
        return transposing_plan(codes, rows, spec)
    of_codes, of_scales = shapes(codes, scheme, rows, swizzled)
    (height, half), side = codes.shape, spec.width
    tiles_across = ceil_div(rows, _TILE)
    tiles = ceil_div(height, _TILE) * tiles_across
    sizes = height, half // 4, rows, of_codes[1] // 4, tiles_across, scales.shape[1]
    slots = (BufferSlot(0), BufferSlot(1), BufferSlot(2), BufferSlot(3))
    values = (*slots, *sizes, 2 * of_codes[1] // side)
    steps = (LaunchStep(transpose_launch(side, swizzled), (tiles, 1), values),) if tiles else ()
    return LaunchPlan(2, (Output(of_codes, torch.uint8), Output(of_scales, scales.dtype)), 0, steps)
