"""q2::split_scales on CUDA: the largest worth by parts (largest.cu), then align_scales.cu."""

import functools

import torch

from q2compile.runtime_kernels.cuda.launch import Launch, empty, launch, multiprocessors, on_device
from q2compile.runtime_kernels.cuda.plan import _NO_SIDE, align_end, align_grid, align_launch
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.layout import ceil_div, scales_shape
from q2compile.runtime_kernels.registry import kernel
from q2compile.runtime_kernels.schemes import get_scheme
from q2compile.runtime_kernels.split_scales.op import checked

NAME = "cuda"
_THREADS = 256
_PER_THREAD = 16  # as many loads as that are under way at once


@functools.cache
def largest_launch() -> Launch:
    return launch("largest.cu", "PPq", _THREADS, defines={})


def _prepare(worth, scheme) -> None:
    for kernel_launch in (largest_launch(), align_launch(get_scheme(scheme), interleaved=False)):
        kernel_launch.warm_up(worth.device.index)


@kernel(
    "split_scales",
    NAME,
    device_type="cuda",
    refuses=lambda worth, scheme: refusal("split_scales", NAME, worth.device.index, scheme),
    prepare=_prepare,
)
def split_scales(worth: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See split_scales/op.py."""
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
    largest_launch()(index, (parts, 1), worth.data_ptr(), largest.data_ptr(), count)
    side = (worth.data_ptr(), largest.data_ptr(), 0, scales.data_ptr(), global_scale.data_ptr())
    align = align_launch(spec, interleaved=False)
    grid, end = align_grid(spec, (rows, blocks)), align_end(spec, blocks, 0)
    align(index, grid, *side, count, 0, parts, *_NO_SIDE, 0, 1.0, *end)
    return scales, global_scale
