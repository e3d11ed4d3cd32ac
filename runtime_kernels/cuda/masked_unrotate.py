"""QuEST on CUDA, Quartet's forward and its backward: q2::quantize_masked by rotate_quantize.cu,
with a mask beside the codes, and q2::masked_unrotate by masked_unrotate.cu.
"""

import functools

import torch

from q2compile.runtime_kernels.cuda import rotation
from q2compile.runtime_kernels.cuda.launch import Launch, empty, launch, on_device
from q2compile.runtime_kernels.cuda.plan import not_served
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.layout import ceil_div
from q2compile.runtime_kernels.masked_unrotate.reference import checked_shapes
from q2compile.runtime_kernels.registry import kernel

NAME = "cuda"
_THREADS = 256
_CHUNK = 32
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _refuses_quantize(x, scheme, transform) -> str | None:
    why = not_served(scheme, transform, masked=True)
    return why or refusal("quantize_masked", NAME, x.device.index, scheme)


def _prepare_quantize(x, scheme, transform) -> None:
    rotation.prepare(x.contiguous(), scheme, transform, (True, False))


@kernel(
    "quantize_masked",
    NAME,
    device_type="cuda",
    refuses=_refuses_quantize,
    prepare=_prepare_quantize,
)
def quantize_masked(x: torch.Tensor, scheme: str, transform: str) -> tuple[torch.Tensor, ...]:
    """See quantize_masked/op.py."""
    draws = ((None, 0), None)
    return rotation.rotated("quantize_masked", x.contiguous(), scheme, transform, draws)[0]


@functools.cache
def unrotate_launch(dtype: torch.dtype) -> Launch:
    defines = {"Q2_TYPE": _TYPES[dtype]}
    return launch("masked_unrotate.cu", "PPPqf", _THREADS, defines=defines)


def _refuses_unrotate(grad, mask, transform) -> str | None:
    if transform != "h32":
        return f"masked_unrotate.cu has chunks of 32 without signs, not {transform}"
    return refusal("masked_unrotate", NAME, grad.device.index, "mxfp4_quest")


def _prepare_unrotate(grad, mask, transform) -> None:
    unrotate_launch(grad.dtype).warm_up(grad.device.index)


@kernel(
    "masked_unrotate",
    NAME,
    device_type="cuda",
    refuses=_refuses_unrotate,
    prepare=_prepare_unrotate,
)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> torch.Tensor:
    """See masked_unrotate/op.py."""
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
