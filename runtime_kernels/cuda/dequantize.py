"""q2::dequantize on CUDA (dequantize.cu), also the first half of the emulated GEMM."""

import functools

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.jit.launch import Launch, empty, launch, on_device
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import CUDA, kernel

THREADS = 256
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@functools.cache
def dequantize_launch(dtype: torch.dtype, mx: bool, whole: bool) -> Launch:
    """The kernel for an output type; whole: all columns, and no scales shared between rows."""
    defines = {"Q2_OUT": _OUT[dtype], "Q2_MX": int(mx), "Q2_WHOLE": int(whole)}
    return launch("dequantize.cu", "PPPPqiii", THREADS, defines=defines)


def _refuses(codes, scales, global_scale, scheme, cols, dtype) -> str | None:
    if dtype not in _OUT:
        return f"it writes bfloat16, float16 and float32, not {dtype}"
    if get_scheme(scheme).swizzled:
        return "dequantize.cu reads plain scales"
    return refusal("dequantize", CUDA, codes.device.index, scheme)


def prepare(codes, scheme: str, cols, dtype: torch.dtype) -> None:
    """Loads what a call with the like of codes, which may be fake, will launch; whether all columns
    are wanted or not, where that is not known."""
    spec = get_scheme(scheme)
    same = cols == 2 * codes.shape[1]
    for whole in (True, False):
        if not statically_known_true(torch.sym_not(same) if whole else same):
            mx = spec.format == "mxfp4"
            dequantize_launch(dtype, mx, whole and spec.block[0] == 1).warm_up(codes.device.index)


def _prepare(codes, scales, global_scale, scheme, cols, dtype) -> None:
    prepare(codes, scheme, cols, dtype)


@kernel("dequantize", CUDA, device_type="cuda", refuses=_refuses, prepare=_prepare)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ops/dequantize.py. global_scale None: code * scale alone."""
    if global_scale is not None:
        check_quantized("dequantize", codes, scales, global_scale)
    codes, scales = codes.contiguous(), scales.contiguous()
    return _dequantize(codes.device.index, codes, scales, global_scale, scheme, cols, dtype)


@on_device
def _dequantize(index: int, codes, scales, global_scale, scheme, cols, dtype) -> torch.Tensor:
    spec = get_scheme(scheme)
    rows, half = codes.shape
    out = empty((rows, cols), (cols, 1), dtype)
    groups = rows * half // 4
    if groups == 0:
        return out
    dequantize_launch(dtype, spec.format == "mxfp4", cols == 2 * half and spec.block[0] == 1)(
        index,
        (ceil_div(groups, THREADS), 1),
        codes.data_ptr(),
        scales.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        out.data_ptr(),
        groups,
        half // 4,
        cols,
        4 if spec.block[0] == 16 else 0,
    )
    return out
