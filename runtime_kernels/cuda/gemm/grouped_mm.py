# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_mm on CUDA: torch's grouped product of bf16 matrices, which reads the ends of the
groups on the device, and zeros in the rows of no group (zero_rows.cu).
"""

import functools

import torch

from q2compile.runtime_kernels.cuda.calls import (
    BufferSlot,
    Launching,
    LaunchPlan,
    LaunchStep,
    OperandLayout,
    cuda_kernel,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch, multiprocessors
from q2compile.runtime_kernels.cuda.jit.limits import capability_of
from q2compile.runtime_kernels.registry import CUDA

_THREADS = 256


@functools.cache
def zero_rows_launch() -> Launch:
    return launch("zero_rows.cu", "PPqqi", _THREADS, defines={})


def unserved(index: int, dtype: torch.dtype, *sizes) -> str | None:
    """None if torch has a grouped kernel for which the host does not wait, otherwise the reason in
    words.

    sizes: of the contiguous dimensions of its operands and its result.
    """
    if capability_of(index) < (8, 0):
        return "torch's grouped products begin with compute capability 8.0"
    if dtype != torch.bfloat16:
        return f"torch's grouped product on the device is one of bfloat16, not of {dtype}"
    odd = [size for size in sizes if isinstance(size, int) and size % 8]
    return f"its rows must be multiples of 16 bytes, not {2 * odd[0]}" if odd else None


def _why_not(a, b, offs) -> str | None:
    return unserved(a.device.index, a.dtype, a.shape[1], b.shape[-1])


@cuda_kernel("grouped_mm", CUDA, _why_not)
def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """See ops/grouped_mm.py."""
    if a.shape[0] == 0 or b.shape[-1] == 0 or (b.dim() == 3 and a.shape[1] == 0):
        shape = (a.shape[0],) if b.dim() == 3 else (offs.shape[0], a.shape[0])
        return a.new_zeros((*shape, b.shape[-1]))
    out = torch._grouped_mm(a, b, offs=offs)
    if b.dim() == 3:
        zero_rows(out, offs)
    return out


def _zero_rows_call(out: torch.Tensor, offs: torch.Tensor) -> LaunchPlan:
    row_bytes = out.stride(0) * out.element_size()
    grid = 2 * multiprocessors(out.device.index), 1
    values = (BufferSlot(0), BufferSlot(1), out.shape[0] * row_bytes, row_bytes, offs.shape[0])
    return LaunchPlan(2, (), 0, (LaunchStep(zero_rows_launch(), grid, values),))


zero_rows = Launching(_zero_rows_call, {1: OperandLayout.CONTIGUOUS})
