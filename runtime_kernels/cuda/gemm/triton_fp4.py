"""q2::gemm by tl.dot_scaled (triton_kernel.py): CUBLASLT_FP4 tensor cores on plain scales."""

import functools
import importlib.util

import torch

from q2compile.runtime_kernels.cuda.gemm.operands import (
    reads_codes,
    reads_plain_scales,
    two_formats,
)
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.ops.gemm import checked
from q2compile.runtime_kernels.registry import TRITON_FP4, kernel

_DOT_SCALED = ((10, 0), (10, 3), (12, 0))


def _refuses_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> str | None:
    index = a_codes.device.index
    capability = torch.cuda.get_device_capability(index)
    if capability not in _DOT_SCALED:
        return "tl.dot_scaled works on compute capability 10.0, 10.3 and 12.0"
    if not _has_triton():
        return "Triton is not installed"
    wrong = two_formats(a_scheme, b_scheme) or reads_plain_scales(a_scheme, b_scheme)
    wrong = wrong or reads_codes(a_scheme, b_scheme)
    return wrong or refusal("gemm", TRITON_FP4, index, a_scheme)


@kernel("gemm", TRITON_FP4, device_type="cuda", refuses=_refuses_triton)
def gemm_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py."""
    from q2compile.runtime_kernels.cuda.gemm.triton_kernel import gemm_fp4

    a_spec, b_spec = checked(
        a_codes, a_scales, a_global, b_codes, b_scales, b_global, a_scheme, b_scheme
    )
    a, b = (a_codes, a_scales, a_global), (b_codes, b_scales, b_global)
    return gemm_fp4(a, b, bias, a_spec, b_spec, dtype)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
