"""q2::dequantize on CUDA (dequantize.cu), also the first half of the emulated GEMM."""

import functools

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.cuda.launch import Launch, launch
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.layout import ceil_div
from q2compile.runtime_kernels.registry import kernel
from q2compile.runtime_kernels.schemes import get_scheme

NAME = "cuda"
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
    return refusal("dequantize", NAME, codes.device.index)


@kernel("dequantize", NAME, device_type="cuda", refuses=_refuses)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See dequantize/op.py. global_scale None: code * scale alone."""
    if global_scale is not None:
        check_quantized("dequantize", codes, scales, global_scale)
    spec = get_scheme(scheme)
    rows, half = codes.shape
    out = torch.empty((rows, cols), dtype=dtype, device=codes.device)
    codes, scales = codes.contiguous(), scales.contiguous()
    groups = rows * half // 4
    if groups == 0:
        return out
    dequantize_launch(dtype, spec.format == "mxfp4", cols == 2 * half and spec.block[0] == 1)(
        codes.device,
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
