# SPDX-License-Identifier: Apache-2.0
"""q2::dequantize on CUDA (dequantize.cu), also the first step of the emulated GEMM."""

import functools
from collections.abc import Iterator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import (
    MOST_OPERANDS,
    BufferSlot,
    LaunchPlan,
    LaunchStep,
    OperandLayout,
    Output,
    in_places,
    launching,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized

THREADS = 256
_MATRIX = "PPPPqiiii"
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@functools.cache
def dequantize_launch(dtype: torch.dtype, mx: bool, whole: bool) -> Launch:
    """The kernel for an output type. whole: all columns are wanted, and no rows share scales."""
    defines = {"Q2_OUT": _OUT[dtype], "Q2_MX": int(mx), "Q2_WHOLE": int(whole)}
    return launch("dequantize.cu", _MATRIX * MOST_OPERANDS, THREADS, defines=defines)


def _why_not(codes, scales, global_scale, scheme, cols, dtype) -> str | None:
    if dtype not in _OUT:
        return f"it writes bfloat16, float16 and float32, not {dtype}"
    if get_scheme(scheme).swizzled:
        return "dequantize.cu reads plain scales"
    return None


def launches(codes, scheme: str, cols, dtype: torch.dtype) -> Iterator[Launch]:
    """The kernels that a call launches; codes may be fake. If it is not known whether all columns
    are wanted: the kernels for both cases."""
    spec = get_scheme(scheme)
    same = cols == 2 * codes.shape[1]
    for whole in (True, False):
        if not statically_known_true(torch.sym_not(same) if whole else same):
            mx = spec.format == "mxfp4"
            yield dequantize_launch(dtype, mx, whole and spec.block[0] == 1)


@launching(
    "dequantize",
    why_not=_why_not,
    launches=lambda codes, scales, global_scale, *rest: launches(codes, *rest),
    layouts={0: OperandLayout.CONTIGUOUS, 1: OperandLayout.CONTIGUOUS},
)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> LaunchPlan:
    """See ops/dequantize.py."""
    check_quantized("dequantize", codes, scales, global_scale)
    spec = get_scheme(scheme)
    rows, half = codes.shape
    inputs = 2 + (global_scale is not None)
    groups = rows * half // 4
    whole = cols == 2 * half and spec.block[0] == 1
    scale_slot = 0 if global_scale is None else BufferSlot(2)
    blocks = max(1, ceil_div(groups, THREADS))
    extents = groups, half // 4, cols, spec.block[0].bit_length() - 1, blocks
    matrix = (BufferSlot(0), BufferSlot(1), scale_slot, BufferSlot(inputs), *extents)
    launched = dequantize_launch(dtype, spec.format == "mxfp4", whole)
    # The kernel has places for more matrices, and finds no thread blocks for those.
    step = LaunchStep(launched, (blocks, 1), in_places([matrix]))
    return LaunchPlan(inputs, (Output((rows, cols), dtype),), 0, (step,))
