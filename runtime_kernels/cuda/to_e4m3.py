# SPDX-License-Identifier: Apache-2.0
"""q2::to_e4m3 on CUDA (to_e4m3.cu): the largest scale, then the elements."""

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
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.to_e4m3 import checked_to_e4m3

_THREADS = 256
_PARTS = 128  # thread blocks that look for the largest scale
_GROUP = 16  # elements of a thread


@functools.cache
def to_e4m3_launch(largest: bool, square: bool) -> Launch:
    """largest: the launch that looks for the largest scale.  square: rows share scales."""
    defines = {"Q2_LARGEST": int(largest), "Q2_SQUARE": int(square and not largest)}
    return launch("to_e4m3.cu", "PPPPPPqqi", _THREADS, overlaps=not largest, defines=defines)


def _launches(scheme: str) -> tuple[Launch, Launch]:
    return to_e4m3_launch(True, False), to_e4m3_launch(False, get_scheme(scheme).block[0] > 1)


@launching(
    "to_e4m3",
    launches=lambda codes, scales, global_scale, scheme: _launches(scheme),
    layouts={0: OperandLayout.ALIGNED, 1: OperandLayout.ALIGNED},
)
def to_e4m3(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: str
) -> LaunchPlan:
    """See ops/to_e4m3.py."""
    checked_to_e4m3(codes, scales, global_scale, scheme)
    rows, width = codes.shape[0], 2 * codes.shape[1]
    groups = rows * width // _GROUP
    values = (*map(BufferSlot, range(6)), scales.numel(), groups, width // _GROUP)
    grids = (_PARTS, 1), (max(1, ceil_div(groups, _THREADS)), 1)
    steps = (LaunchStep(*each, values) for each in zip(_launches(scheme), grids, strict=True))
    outputs = Output((rows, width), torch.float8_e4m3fn), Output((), torch.float32)
    return LaunchPlan(3, outputs, 4 * _PARTS, tuple(steps))
