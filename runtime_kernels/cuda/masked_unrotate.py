"""q2::masked_unrotate on CUDA, the backward of QuEST: masked_unrotate.cu."""

import functools

import torch

from q2compile.runtime_kernels.cuda.jit.launch import Launch, empty, launch, on_device
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.ops.masked_unrotate import checked_shapes
from q2compile.runtime_kernels.registry import CUDA, kernel

_THREADS = 256
_CHUNK = 32
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@functools.cache
def unrotate_launch(dtype: torch.dtype) -> Launch:
    defines = {"Q2_TYPE": _TYPES[dtype]}
    return launch("masked_unrotate.cu", "PPPqf", _THREADS, defines=defines)


def _refuses_unrotate(grad, mask, transform) -> str | None:
    if transform != "h32":
        return f"masked_unrotate.cu has chunks of 32 without signs, not {transform}"
    return refusal("masked_unrotate", CUDA, grad.device.index, "mxfp4_quest")


def _prepare_unrotate(grad, mask, transform) -> None:
    unrotate_launch(grad.dtype).warm_up(grad.device.index)


@kernel(
    "masked_unrotate",
    CUDA,
    device_type="cuda",
    refuses=_refuses_unrotate,
    prepare=_prepare_unrotate,
)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> torch.Tensor:
    """See ops/masked_unrotate.py."""
    norm = checked_shapes(grad, mask, transform).norm
    grad, mask = grad.contiguous(), mask.contiguous()
    if grad.data_ptr() % 16 or mask.data_ptr() % 4:  # views into larger tensors
        grad, mask = grad.clone(), mask.clone()
    return _masked_unrotate(grad.device.index, grad, mask, norm)


@on_device
def _masked_unrotate(index: int, grad, mask, norm: float) -> torch.Tensor:
    out = empty(tuple(grad.shape), grad.stride(), grad.dtype)
    chunks = grad.numel() // _CHUNK
    if chunks:
        unrotate_launch(grad.dtype)(
            index,
            (ceil_div(chunks, _THREADS), 1),
            *(grad.data_ptr(), mask.data_ptr(), out.data_ptr(), chunks, norm),
        )
    return out
