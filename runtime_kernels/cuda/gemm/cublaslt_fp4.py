"""q2::gemm on CUDA: cuBLASLt's fp4 GEMM where the GPU has one, two bf16 matrices and cuBLAS
elsewhere.

The fp4 GEMM is torch.nn.functional.scaled_mm, inside our own op. It takes block scales in the
32x4x4 layout, and quantisers write them so for operands that only it and requantisations read (pass
swizzle_scales). For others swizzle_scales.cu does it on the way, over 1/16 of the elements:

    weights in 16x16 blocks, and what q2::transpose makes of them (recipe nvfp4): they are saved for
        backward with one scale for 16 rows, the tensor cores read 16 copies of it
    codes that a graph takes as inputs: the option cache_weights
    what dequantize, grouped_gemm or the caller of the graph reads as well
    calls outside of a compiled graph

The bf16 GEMM is exact but for the order of the sums: code * scale has 6 significant bits, and a
power of two as global scale is folded in for nothing.
"""

import functools
import importlib.util

import torch
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from q2compile.runtime_kernels.cuda.dequantize import dequantize, prepare
from q2compile.runtime_kernels.cuda.launch import Launch, empty, launch, on_device
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.gemm.op import checked
from q2compile.runtime_kernels.layout import ceil_div
from q2compile.runtime_kernels.registry import kernel
from q2compile.runtime_kernels.schemes import Scheme, get_scheme

BF16 = "cuda_bf16"
FP4 = "cublaslt_fp4"
TRITON = "triton_fp4"
_DOT_SCALED = ((10, 0), (10, 3), (12, 0))
THREADS = 256


def _refuses_bf16(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    return _swizzled_scales(a_scheme, b_scheme) or refusal(
        "gemm", BF16, a_codes.device.index, a_scheme
    )


def _prepare_bf16(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> None:
    for codes, scheme in ((a_codes, a_scheme), (b_codes, b_scheme)):
        if not get_scheme(scheme).widened:
            prepare(codes, scheme, 2 * codes.shape[1], torch.bfloat16)


@kernel("gemm", BF16, device_type="cuda", refuses=_refuses_bf16, prepare=_prepare_bf16)
def gemm_bf16(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See gemm/op.py."""
    a_spec, b_spec = checked(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    folds = a_spec.folds and b_spec.folds
    a = _bf16(a_codes, a_scales, a_global if folds else None, a_spec)
    b = _bf16(b_codes, b_scales, b_global if folds else None, b_spec)
    if folds and dtype == torch.bfloat16:
        if bias is None:
            return a @ b.t()
        if bias.dtype == dtype:  # added to the fp32 sums
            return torch.addmm(bias, a, b.t())
    out = torch.mm(a, b.t(), out_dtype=torch.float32)
    return finished(out, None if folds else a_global * b_global, bias, dtype)


def _bf16(codes, scales, global_scale, spec: Scheme) -> torch.Tensor:
    """code * scale, and * global_scale where it is given: bf16 [M, Kp], exact."""
    if spec.widened:
        return codes
    return dequantize(codes, scales, global_scale, spec.name, 2 * codes.shape[1], torch.bfloat16)


def _refuses_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    index = a_codes.device.index
    capability = torch.cuda.get_device_capability(index)
    if capability not in _DOT_SCALED:
        return "tl.dot_scaled works on compute capability 10.0, 10.3 and 12.0"
    if not _has_triton():
        return "Triton is not installed"
    wrong = _two_formats(a_scheme, b_scheme) or _swizzled_scales(a_scheme, b_scheme)
    wrong = wrong or _no_codes(a_scheme, b_scheme)
    return wrong or refusal("gemm", TRITON, index, a_scheme)


# Before cuBLASLt's in this file, so after it in the order in which they are tried.
@kernel("gemm", TRITON, device_type="cuda", refuses=_refuses_triton)
def gemm_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See gemm/op.py, gemm/triton.py."""
    from q2compile.runtime_kernels.gemm.triton import gemm_fp4

    a_spec, b_spec = checked(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    a, b = (a_codes, a_scales, a_global), (b_codes, b_scales, b_global)
    return gemm_fp4(a, b, bias, a_spec, b_spec, dtype)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _two_formats(a_scheme: str, b_scheme: str) -> str | None:
    formats = get_scheme(a_scheme).format, get_scheme(b_scheme).format
    return None if formats[0] == formats[1] else f"one operand is {formats[0]}, one {formats[1]}"


def _swizzled_scales(a_scheme: str, b_scheme: str) -> str | None:
    swizzled = get_scheme(a_scheme).swizzled or get_scheme(b_scheme).swizzled
    return "it reads plain scales" if swizzled else None


def _no_codes(a_scheme: str, b_scheme: str) -> str | None:
    widened = get_scheme(a_scheme).widened or get_scheme(b_scheme).widened
    return "it reads codes, not the bf16 numbers that they stand for" if widened else None


def _refuses_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    index = a_codes.device.index
    if torch.cuda.get_device_capability(index)[0] < 10:
        return "fp4 tensor cores begin with compute capability 10.0"
    wrong = _two_formats(a_scheme, b_scheme) or _no_codes(a_scheme, b_scheme)
    return wrong or refusal("gemm", FP4, index, a_scheme)


def _prepare_fp4(a_codes, *rest) -> None:
    swizzle_launch().warm_up(a_codes.device.index)


@kernel("gemm", FP4, device_type="cuda", refuses=_refuses_fp4, prepare=_prepare_fp4)
def gemm_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See gemm/op.py. fp32 sums; one rounding where alpha and bias are left to cuBLASLt."""
    a_spec, b_spec = checked(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    rows = b_codes.shape[0]
    if a_codes.shape[0] == 0 or rows == 0:
        return torch.empty((a_codes.shape[0], rows), dtype=dtype, device=a_codes.device)
    arguments = scaled_mm_arguments(
        a_codes,
        swizzled(a_scales, a_codes.shape[0], a_spec),
        a_global,
        b_codes,
        swizzled(b_scales, rows, b_spec),
        b_global,
        a_spec,
    )
    alone = bias is None and a_spec.format == "nvfp4"  # alpha is the product of the global scales
    out = scaled_mm(**arguments, output_dtype=dtype if alone else torch.float32)[:, :rows]
    if alone:
        return out.contiguous()
    alpha = None if a_spec.format == "nvfp4" else a_global * b_global
    return finished(out, alpha, bias, dtype)


def scaled_mm_arguments(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, spec: Scheme
) -> dict:
    """What torch.nn.functional.scaled_mm is called with, all but the output's type.

    Packed codes are [M, K/2] and, transposed, [K/2, N]; both dimensions of the second and the
    packed contraction are padded with zeros to multiples of 16. Scales are already swizzled;
    padding codes changes none of their sizes.
    """
    contraction, rows = -a_codes.shape[1] % 16, -b_codes.shape[0] % 16
    a = pad(a_codes, (0, contraction)) if contraction else a_codes.contiguous()
    b = pad(b_codes, (0, contraction, 0, rows)) if contraction or rows else b_codes.contiguous()
    nvfp4 = spec.format == "nvfp4"
    recipe = (
        [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        if nvfp4
        else [ScalingType.BlockWise1x32]
    )
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(recipe)]
    return {
        "mat_a": a.view(torch.float4_e2m1fn_x2),
        "mat_b": b.view(torch.float4_e2m1fn_x2).t(),
        "scale_a": [a_scales, a_global][: len(recipe)],
        "scale_recipe_a": recipe,
        "scale_b": [b_scales, b_global][: len(recipe)],
        "scale_recipe_b": recipe,
        "swizzle_a": swizzle,
        "swizzle_b": swizzle,
    }


def finished(
    out: torch.Tensor, alpha: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """(out * alpha + bias) of fp32 sums, rounded to dtype once."""
    if alpha is not None:
        out = out * alpha
    if bias is not None:
        out = out + bias
    return out.to(dtype)


@functools.cache
def swizzle_launch() -> Launch:
    return launch("swizzle_scales.cu", "PPiiiii", THREADS, defines={})


def swizzled(scales: torch.Tensor, rows: int, spec: Scheme) -> torch.Tensor:
    """Scales of `rows` rows in the 32x4x4 layout (runtime_kernels/swizzle.py), flat, padded with
    zeros; those of 16x16 blocks are repeated for each of their rows. Nothing is done for a scheme
    that has them so already."""
    if spec.swizzled:
        return scales.flatten()
    return _swizzled(scales.device.index, scales.contiguous(), rows, spec)


@on_device
def _swizzled(index: int, scales: torch.Tensor, rows: int, spec: Scheme) -> torch.Tensor:
    blocks = scales.shape[1]
    tiles_across = ceil_div(blocks, 4)
    words = ceil_div(rows, 128) * tiles_across * 128
    out = empty((4 * words,), (1,), scales.dtype)
    swizzle_launch()(
        index,
        (ceil_div(words, THREADS), 1),
        scales.data_ptr(),
        out.data_ptr(),
        rows,
        blocks,
        4 if spec.block[0] == 16 else 0,
        tiles_across,
        words,
    )
    return out
