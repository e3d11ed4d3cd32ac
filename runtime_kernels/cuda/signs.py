# SPDX-License-Identifier: Apache-2.0
"""q2::signs on CUDA: signs.cu."""

import functools

import torch

from q2compile.runtime_kernels.cuda.calls import (
    BufferSlot,
    LaunchPlan,
    LaunchStep,
    Output,
    launching,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.ops.signs import checked_signs


@functools.cache
def signs_launch() -> Launch:
    return launch("signs.cu", "PPi", 128, defines={})


@launching(
    "signs",
    launches=lambda seed, transform: [signs_launch()],
)
def signs(seed: torch.Tensor, transform: str) -> LaunchPlan:
    """See ops/signs.py."""
    size = checked_signs(transform).size
    step = LaunchStep(signs_launch(), (1, 1), (BufferSlot(0), BufferSlot(1), size))
    return LaunchPlan(1, (Output((size,), torch.float32),), 0, (step,))
