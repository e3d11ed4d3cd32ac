# SPDX-License-Identifier: Apache-2.0
"""q2::gemm and q2::gemm_masked_unrotate by tl.dot_scaled (triton_kernel.py): fp4 tensor cores in
one launch, nvfp4 and mxfp4."""

import functools
import importlib.util
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import first_launch, swizzle
from q2compile.runtime_kernels.cuda.gemm.operands import (
    ALIGNMENT,
    aligned,
    padded,
    reads_codes,
    two_formats,
    without_contraction,
)
from q2compile.runtime_kernels.cuda.jit.launch import multiprocessors
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_dot_scaled, why_no_fp4
from q2compile.runtime_kernels.cuda.recent_launches import note
from q2compile.runtime_kernels.kernel_states import (
    KNOWN,
    LaunchError,
    assumed_capability,
    kernels_own,
)
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.gemm import checked_gemm
from q2compile.runtime_kernels.ops.masked_unrotate import check_shape
from q2compile.runtime_kernels.ops.table import GEMM, GEMM_MASKED_UNROTATE
from q2compile.runtime_kernels.registry import TRITON_FP4


def _why_not(*args) -> str | None:
    schemes = args[7:9]
    return unserved(args[0].device.index) or two_formats(*schemes) or reads_codes(*schemes)


def unserved(index: int) -> str | None:
    """None where tl.dot_scaled is fp4 tensor-core instructions, otherwise the reason in words."""
    if assumed_capability():
        return why_no_fp4(capability_of(index))
    return why_no_dot_scaled(capability_of(index), triton_version())


def _prepare(*args) -> None:
    swizzle.prepare(args[0].device.index, *args[7:9])


@cuda_kernel("gemm", TRITON_FP4, _why_not, _prepare)
def gemm_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> torch.Tensor:
    """See ops/gemm.py."""
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    return _gemm(*operands, bias, a_scheme, b_scheme, dtype)


def _why_no_unrotation(*args) -> str | None:
    if args[9] != "h32":
        return f"its epilogue rotates chunks of 32 without signs back, not {args[9]}"
    return _why_not(*args)


@cuda_kernel("gemm_masked_unrotate", TRITON_FP4, _why_no_unrotation, _prepare)
def gemm_masked_unrotate_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, mask, a_scheme, b_scheme, *more
) -> torch.Tensor:
    """See ops/gemm_masked_unrotate.py."""
    transform, dtype = more
    check_shape((a_codes.shape[0], b_codes.shape[0]), mask, get_transform(transform))
    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    return _gemm(*operands, None, a_scheme, b_scheme, dtype, mask, transform)


def _gemm(
    a_codes,
    a_scales,
    a_global,
    b_codes,
    b_scales,
    b_global,
    bias,
    a_scheme,
    b_scheme,
    dtype,
    mask=None,
    transform="none",
) -> torch.Tensor:
    """The product; masked and rotated back, where a mask is given."""
    from q2compile.runtime_kernels.cuda.gemm.triton_kernel import Unrotation, choose_tile, gemm_fp4

    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    a_spec, b_spec = checked_gemm(*operands, a_scheme, b_scheme)
    if b_global is None:
        b_global = a_global.new_ones(())
    rows, columns = a_codes.shape[0], b_codes.shape[0]
    if 0 in (*a_codes.shape, columns):
        return without_contraction(a_codes, b_codes, bias, dtype)
    width = ceil_div(a_codes.shape[1], ALIGNMENT) * ALIGNMENT
    a = padded(a_codes, rows, width), swizzle.swizzled(a_scales, rows, a_spec), a_global
    b = padded(b_codes, columns, width), swizzle.swizzled(b_scales, columns, b_spec), b_global
    index = a_codes.device.index
    major = torch.cuda.get_device_capability(index)[0]
    tile = choose_tile(major, rows, columns, multiprocessors(index))
    unrotation = None
    if mask is not None:
        unrotation = Unrotation(aligned(mask.contiguous()), get_transform(transform).norm)
    variant = tile, a_spec.width, dtype, bias is None or bias.dtype, transform, width % tile.k
    op = GEMM if mask is None else GEMM_MASKED_UNROTATE
    first = None
    if first_launch.needed(rows, columns, 2 * width):
        of_rows = first_launch.rows_class(rows)
        schemes = a_scheme, b_scheme
        masked = (mask, *schemes, transform)
        call = (*operands, *((bias, *schemes) if mask is None else masked), dtype)
        first = first_launch.begin(op, TRITON_FP4, a_codes.device, *variant, of_rows, call=call)

    def finish(rows_of_product, picked, begin, end):
        part = mask[picked, begin // 8 : end // 8].contiguous()
        return torch.ops.q2.masked_unrotate(rows_of_product, part, transform)

    with first_launch.marked(first):
        with compiling(op, a_codes.device, variant), on_device(index):
            out = gemm_fp4(a, b, bias, a_spec.width, dtype, tile, unrotation)
        if first is not None:
            factors = (
                first_launch.Factor(a_codes, a_scales, a_global, a_spec),
                first_launch.Factor(b_codes, b_scales, b_global, b_spec),
            )
            first_launch.compare(first, out, *factors, bias, finish if mask is not None else None)
    return out


@contextmanager
def compiling(op: str, device: torch.device, variant: Hashable) -> Iterator[None]:
    """A context for a launch by an op: a variant that Triton cannot compile is compiled once, not
    for each count of tokens.

    Raises:
        LaunchError: it failed before.
    """
    if (device, variant) in KNOWN.sources:
        raise LaunchError(KNOWN.sources[device, variant])
    note(f"q2::{op} by {TRITON_FP4}")
    try:
        yield
    except Exception as error:
        if kernels_own(error, op, TRITON_FP4, device):
            KNOWN.sources[device, variant] = f"{type(error).__name__}: {error}"
        raise


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Major and minor; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)
