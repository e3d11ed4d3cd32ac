# SPDX-License-Identifier: Apache-2.0
"""q2::padded_ends on CUDA: padded_ends.cu."""

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
from q2compile.runtime_kernels.ops.argument_checks import check_groups


@functools.cache
def padded_ends_launch(filled: bool = False) -> Launch:
    return launch("padded_ends.cu", "PPi", 32, defines={"Q2_FILLED": 1} if filled else {})


@launching(
    "padded_ends",
    launches=lambda offs, filled=False: [padded_ends_launch(filled)],
    layouts={0: OperandLayout.CONTIGUOUS},
)
def padded_ends(offs: torch.Tensor, filled: bool = False) -> LaunchPlan:
    """See ops/padded_ends.py."""
    check_groups("padded_ends", offs)
    values = BufferSlot(0), BufferSlot(1), offs.shape[0]
    step = LaunchStep(padded_ends_launch(filled), (1, 1), values)
    return LaunchPlan(1, (Output(tuple(offs.shape), torch.int32),), 0, (step,))
