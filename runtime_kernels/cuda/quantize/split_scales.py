"""q2::split_scales on CUDA: the largest worth by parts (partial_max.cu), then align_scales.cu."""

import functools

import torch

from q2compile.runtime_kernels.cuda.jit.launch import (
    Launch,
    empty,
    launch,
    multiprocessors,
    on_device,
)
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    NO_SIDE,
    align_end,
    align_grid,
    align_launch,
)
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div, scales_shape
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.split_scales import checked
from q2compile.runtime_kernels.registry import CUDA, kernel

_THREADS = 256
_PER_THREAD = 16  # as many loads as that are under way at once


@functools.cache
def partial_max_launch() -> Launch:
    return launch("partial_max.cu", "PPq", _THREADS, defines={})


def _prepare(worth, scheme) -> None:
    for kernel_launch in (
        partial_max_launch(),
        align_launch(get_scheme(scheme), interleaved=False),
    ):
        kernel_launch.warm_up(worth.device.index)


@kernel(
    "split_scales",
    CUDA,
    device_type="cuda",
    refuses=lambda worth, scheme: refusal("split_scales", CUDA, worth.device.index, scheme),
    prepare=_prepare,
)
def split_scales(worth: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops/split_scales.py."""
    checked(worth, scheme)
    return _split_scales(worth.device.index, worth.contiguous(), scheme)


@on_device
def _split_scales(index: int, worth: torch.Tensor, scheme: str):
    spec = get_scheme(scheme)
    rows, blocks = worth.shape
    count = rows * blocks
    parts = max(1, min(ceil_div(count, _THREADS * _PER_THREAD), 8 * multiprocessors(index)))
    largest = empty((parts,), (1,), torch.int32)
    shape = scales_shape(rows, blocks, spec) if spec.swizzled else (rows, blocks)
    scales = empty(shape, (shape[1], 1), torch.float8_e4m3fn)
    global_scale = empty((), (), torch.float32)
    partial_max_launch()(index, (parts, 1), worth.data_ptr(), largest.data_ptr(), count)
    side = (worth.data_ptr(), largest.data_ptr(), 0, scales.data_ptr(), global_scale.data_ptr())
    align = align_launch(spec, interleaved=False)
    grid, end = align_grid(spec, (rows, blocks)), align_end(spec, blocks, 0)
    align(index, grid, *side, count, 0, parts, *NO_SIDE, 0, 1.0, *end)
    return scales, global_scale
