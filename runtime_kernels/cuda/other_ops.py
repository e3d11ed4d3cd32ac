# SPDX-License-Identifier: Apache-2.0
"""Ops other than quantizers and GEMMs.

q2::dequantize         dequantize.cu, also the first step of the emulated GEMM
q2::masked_unrotate    masked_unrotate.cu, the backward of QuEST
q2::signs              signs.cu, the signs of a random Hadamard transform
q2::split_scales       partial_max.cu, then align_scales.cu: raw scales from Inductor's kernels
q2::to_e4m3            to_e4m3.cu, MXFP4 codes for fp8 tensor cores
q2::transpose          transpose.cu: codes in square blocks, which the backward uses again; codes of
                       fp8 by transposable.cu
"""

import functools

import torch

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
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch, multiprocessors
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    Alignment,
    TailOperand,
    align_launch,
    thread_blocks_of,
)
from q2compile.runtime_kernels.cuda.quantize.plan import Groups
from q2compile.runtime_kernels.cuda.quantize.transposable import transposing_plan
from q2compile.runtime_kernels.numerics.layout import ceil_div, scales_shape
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.ops.masked_unrotate import checked_shapes
from q2compile.runtime_kernels.ops.signs import checked_signs
from q2compile.runtime_kernels.ops.split_scales import checked_split_scales
from q2compile.runtime_kernels.ops.to_e4m3 import checked_to_e4m3
from q2compile.runtime_kernels.ops.transpose import checked_transpose, shapes

_THREADS = 256
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

# ---- dequantize ----

_MATRIX = "PPPPqiiii"


@functools.cache
def dequantize_launch(dtype: torch.dtype, mx: bool, whole: bool) -> Launch:
    """The kernel for an output type. whole: all columns are wanted, and no rows share scales."""
    defines = {"Q2_OUT": _TYPES[dtype], "Q2_MX": int(mx), "Q2_WHOLE": int(whole)}
    return launch("dequantize.cu", _MATRIX * MOST_OPERANDS, _THREADS, defines=defines)


def _why_not_dequantize(codes, scales, global_scale, scheme, cols, dtype) -> str | None:
    if dtype not in _TYPES:
        return f"it writes bfloat16, float16 and float32, not {dtype}"
    if get_scheme(scheme).swizzled:
        return "dequantize.cu reads plain scales"
    return None


@launching(
    "dequantize",
    why_not=_why_not_dequantize,
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
    blocks = max(1, ceil_div(groups, _THREADS))
    extents = groups, half // 4, cols, spec.block[0].bit_length() - 1, blocks
    matrix = (BufferSlot(0), BufferSlot(1), scale_slot, BufferSlot(inputs), *extents)
    launched = dequantize_launch(dtype, spec.format == "mxfp4", whole)
    # The kernel has places for more matrices, and finds no thread blocks for those.
    step = LaunchStep(launched, (blocks, 1), in_places([matrix]))
    return LaunchPlan(inputs, (Output((rows, cols), dtype),), 0, (step,))


# ---- masked_unrotate ----

_CHUNK = 32


@functools.cache
def unrotate_launch(dtype: torch.dtype) -> Launch:
    defines = {"Q2_TYPE": _TYPES[dtype]}
    return launch("masked_unrotate.cu", "PPPqf", _THREADS, defines=defines)


def _why_not_unrotate(grad, mask, transform) -> str | None:
    if transform != "h32":
        return f"masked_unrotate.cu has chunks of 32 without signs, not {transform}"
    return None


@launching(
    "masked_unrotate",
    why_not=_why_not_unrotate,
    layouts={0: OperandLayout.ALIGNED, 1: OperandLayout.ALIGNED},
)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> LaunchPlan:
    """See ops/masked_unrotate.py."""
    norm = checked_shapes(grad, mask, transform).norm
    chunks = grad.numel() // _CHUNK
    steps: tuple[LaunchStep, ...] = ()
    if chunks:
        values = (BufferSlot(0), BufferSlot(1), BufferSlot(2), chunks, norm)
        steps = (LaunchStep(unrotate_launch(grad.dtype), (ceil_div(chunks, _THREADS), 1), values),)
    return LaunchPlan(2, (Output(tuple(grad.shape), grad.dtype),), 0, steps)


# ---- signs ----


@functools.cache
def signs_launch() -> Launch:
    return launch("signs.cu", "PPi", 128, defines={})


@launching("signs")
def signs(seed: torch.Tensor, transform: str) -> LaunchPlan:
    """See ops/signs.py."""
    size = checked_signs(transform).size
    step = LaunchStep(signs_launch(), (1, 1), (BufferSlot(0), BufferSlot(1), size))
    return LaunchPlan(1, (Output((size,), torch.float32),), 0, (step,))


# ---- split_scales ----

_PER_THREAD = 16  # loads in flight at once


@functools.cache
def partial_max_launch() -> Launch:
    return launch("partial_max.cu", "PPq", _THREADS, defines={})


@launching("split_scales", layouts={0: OperandLayout.CONTIGUOUS})
def split_scales(raw_scale: torch.Tensor, scheme: str) -> LaunchPlan:
    """See ops/split_scales.py."""
    spec = checked_split_scales(raw_scale, scheme)
    rows, blocks = raw_scale.shape
    count = rows * blocks
    most = 8 * multiprocessors(raw_scale.device.index)
    parts = max(1, min(ceil_div(count, _THREADS * _PER_THREAD), most))
    shape = scales_shape(rows, blocks, spec) if spec.swizzled else (rows, blocks)
    outputs = Output(shape, torch.float8_e4m3fn), Output((), torch.float32)
    raw_scales, scales, global_scale, largest = map(BufferSlot, range(4))
    operand = TailOperand(
        *(raw_scales, largest, 0, scales, global_scale, 0, 0, 0, count, 0, parts),
        norm=1.0,
        blocks=max(1, blocks),
        partner=-1,
    )
    tail = Alignment(
        align_launch(spec, interleaved=False), (operand,), thread_blocks_of(spec, (rows, blocks))
    )
    first = LaunchStep(partial_max_launch(), (parts, 1), (raw_scales, largest, count))
    return LaunchPlan(1, outputs, 4 * parts, (first, tail.step), tail)


# ---- to_e4m3 ----

_PARTS = 128  # thread blocks that look for the largest scale
_GROUP = 16  # elements of a thread


@functools.cache
def to_e4m3_launch(largest: bool, square: bool) -> Launch:
    """largest: the launch that looks for the largest scale.  square: rows share scales."""
    defines = {"Q2_LARGEST": int(largest), "Q2_SQUARE": int(square and not largest)}
    return launch("to_e4m3.cu", "PPPPPPqqi", _THREADS, overlaps=not largest, defines=defines)


@launching("to_e4m3", layouts={0: OperandLayout.ALIGNED, 1: OperandLayout.ALIGNED})
def to_e4m3(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: str
) -> LaunchPlan:
    """See ops/to_e4m3.py."""
    checked_to_e4m3(codes, scales, global_scale, scheme)
    rows, width = codes.shape[0], 2 * codes.shape[1]
    groups = rows * width // _GROUP
    values = (*map(BufferSlot, range(6)), scales.numel(), groups, width // _GROUP)
    elements = to_e4m3_launch(False, get_scheme(scheme).block[0] > 1)
    steps = (
        LaunchStep(to_e4m3_launch(True, False), (_PARTS, 1), values),
        LaunchStep(elements, (max(1, ceil_div(groups, _THREADS)), 1), values),
    )
    outputs = Output((rows, width), torch.float8_e4m3fn), Output((), torch.float32)
    return LaunchPlan(3, outputs, 4 * _PARTS, steps)


# ---- transpose ----

_TILE = 128


@functools.cache
def transpose_launch(side: int, swizzled: bool) -> Launch:
    defines = {"Q2_SIDE": side, "Q2_SWIZZLED": int(swizzled)}
    return launch("transpose.cu", "PPPPiiiiiii", _THREADS, defines=defines)


def _transpose_layouts(
    codes, scales, scheme: str, rows, swizzled: bool = False, offs=None, padded_offs=None
) -> dict[int, OperandLayout]:
    contiguous = [i for i, ends in ((5, offs), (6, padded_offs)) if ends is not None]
    return {0: OperandLayout.ALIGNED, **dict.fromkeys([1, *contiguous], OperandLayout.CONTIGUOUS)}


@launching("transpose", layouts=_transpose_layouts)
def transpose(
    codes: torch.Tensor,
    scales: torch.Tensor,
    scheme: str,
    rows: int,
    swizzled: bool = False,
    offs: torch.Tensor | None = None,
    padded_offs: torch.Tensor | None = None,
) -> LaunchPlan:
    """See ops/transpose.py."""
    spec = checked_transpose(scheme)
    check_quantized("transpose", codes, scales, None, dtype=spec.codes_dtype)
    of_codes, of_scales = shapes(codes, scheme, rows, swizzled, offs, padded_offs)
    if spec.is_tensorwise:
        groups = None if offs is None else Groups(BufferSlot(2), BufferSlot(3), offs.shape[0])
        return transposing_plan(codes, rows, spec, groups)
    (height, half), side = codes.shape, spec.width
    tiles_across = ceil_div(rows, _TILE)
    tiles = ceil_div(height, _TILE) * tiles_across
    sizes = height, half // 4, rows, of_codes[1] // 4, tiles_across, scales.shape[1]
    slots = (BufferSlot(0), BufferSlot(1), BufferSlot(2), BufferSlot(3))
    values = (*slots, *sizes, 2 * of_codes[1] // side)
    steps = (LaunchStep(transpose_launch(side, swizzled), (tiles, 1), values),) if tiles else ()
    return LaunchPlan(2, (Output(of_codes, torch.uint8), Output(of_scales, scales.dtype)), 0, steps)
