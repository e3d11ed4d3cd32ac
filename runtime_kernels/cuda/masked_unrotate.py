# SPDX-License-Identifier: Apache-2.0
"""q2::masked_unrotate on CUDA, the backward of QuEST: masked_unrotate.cu."""

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
from q2compile.runtime_kernels.ops.masked_unrotate import checked_shapes

_THREADS = 256
_CHUNK = 32
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@functools.cache
def unrotate_launch(dtype: torch.dtype) -> Launch:
    defines = {"Q2_TYPE": _TYPES[dtype]}
    return launch("masked_unrotate.cu", "PPPqf", _THREADS, defines=defines)


def _why_not(grad, mask, transform) -> str | None:
    if transform != "h32":
        return f"masked_unrotate.cu has chunks of 32 without signs, not {transform}"
    return None


@launching(
    "masked_unrotate",
    why_not=_why_not,
    launches=lambda grad, mask, transform: [unrotate_launch(grad.dtype)],
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
