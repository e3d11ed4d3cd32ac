# SPDX-License-Identifier: Apache-2.0
"""q2::split_scales on CUDA: partial maxima of the raw scales (partial_max.cu), then
align_scales.cu."""

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
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch, multiprocessors
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    Alignment,
    TailOperand,
    align_launch,
    thread_blocks_of,
)
from q2compile.runtime_kernels.numerics.layout import ceil_div, scales_shape
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.split_scales import checked_split_scales

_THREADS = 256
_PER_THREAD = 16  # loads in flight at once


@functools.cache
def partial_max_launch() -> Launch:
    return launch("partial_max.cu", "PPq", _THREADS, defines={})


@launching(
    "split_scales",
    launches=lambda raw_scale, scheme: [
        partial_max_launch(),
        align_launch(get_scheme(scheme), interleaved=False),
    ],
    layouts={0: OperandLayout.CONTIGUOUS},
)
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
