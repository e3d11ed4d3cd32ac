"""q2::gemm by cuBLASLt's fp4 GEMM: torch.nn.functional.scaled_mm, inside our own op.

It takes block scales in the 32x4x4 layout, and quantisers write them so for operands that only it
and requantisations read (pass swizzle_scales). For others swizzle_scales.cu does it on the way,
over 1/16 of the elements:

    weights in 16x16 blocks, and what q2::transpose makes of them (recipe nvfp4): they are saved for
        backward with one scale for 16 rows, the tensor cores read 16 copies of it
    codes that a graph takes as inputs: the option cache_weights
    what dequantize, grouped_gemm or the caller of the graph reads as well
    calls outside of a compiled graph
"""

import functools

import torch
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, Launching, Output, Step
from q2compile.runtime_kernels.cuda.gemm.operands import finished, reads_codes, two_formats
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.ops.gemm import checked
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, kernel

THREADS = 256


def _refuses_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    index = a_codes.device.index
    if torch.cuda.get_device_capability(index)[0] < 10:
        return "fp4 tensor cores begin with compute capability 10.0"
    wrong = two_formats(a_scheme, b_scheme) or reads_codes(a_scheme, b_scheme)
    return wrong or refusal("gemm", CUBLASLT_FP4, index, a_scheme)


def _prepare_fp4(a_codes, *rest) -> None:
    swizzle_launch().warm_up(a_codes.device.index)


@kernel("gemm", CUBLASLT_FP4, device_type="cuda", refuses=_refuses_fp4, prepare=_prepare_fp4)
def gemm_fp4(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py. fp32 sums; one rounding where alpha and bias are left to cuBLASLt."""
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


@functools.cache
def swizzle_launch() -> Launch:
    return launch("swizzle_scales.cu", "PPiiiii", THREADS, defines={})


def swizzled(scales: torch.Tensor, rows: int, spec: Scheme) -> torch.Tensor:
    """Scales of `rows` rows in the 32x4x4 layout (numerics/swizzle.py), flat, padded with
    zeros; those of 16x16 blocks are repeated for each of their rows. Nothing is done for a scheme
    that has them so already."""
    if spec.swizzled:
        return scales.flatten()
    return _swizzled(scales, rows, spec.block[0])


def _swizzle_call(scales: torch.Tensor, rows: int, height: int) -> Call:
    blocks = scales.shape[1]
    tiles_across = ceil_div(blocks, 4)
    words = ceil_div(rows, 128) * tiles_across * 128
    shift = height.bit_length() - 1  # blocks of 1 or 16 rows
    values = (At(0), At(1), rows, blocks, shift, tiles_across, words)
    grid = ceil_div(words, THREADS), 1
    output = Output((4 * words,), scales.dtype)
    return Call(1, (output,), 0, (Step(swizzle_launch(), grid, values),))


_swizzled = Launching(_swizzle_call, {0: Form.CONTIGUOUS})
