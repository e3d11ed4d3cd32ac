# SPDX-License-Identifier: Apache-2.0
"""q2::gemm, q2::gemm_masked_unrotate (triton_kernel.py) and q2::grouped_gemm
(triton_grouped_kernel.py) by tl.dot_scaled: fp4 tensor cores in one launch, for nvfp4 and mxfp4.
A grouped product does not make the host wait for the device."""

import functools
import importlib.util
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import first_launch, swizzle
from q2compile.runtime_kernels.cuda.gemm.operands import (
    ALIGNMENT,
    aligned,
    padded,
    why_not_fp4,
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
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.gemm import checked_factors, checked_gemm, factors_of
from q2compile.runtime_kernels.ops.grouped_gemm import result_shape
from q2compile.runtime_kernels.ops.masked_unrotate import check_shape
from q2compile.runtime_kernels.ops.table import GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM
from q2compile.runtime_kernels.registry import TRITON_FP4


def _why_not(*args: Any) -> str | None:
    return unserved(args[0].device.index) or why_not_fp4(*factors_of(args))


def unserved(index: int) -> str | None:
    """None where tl.dot_scaled is fp4 tensor-core instructions, otherwise the reason in words."""
    if assumed_capability():
        return why_no_fp4(capability_of(index))
    return why_no_dot_scaled(capability_of(index), triton_version())


@cuda_kernel(GEMM, TRITON_FP4, _why_not)
def gemm_triton(*args: Any) -> torch.Tensor:
    """See ops/gemm.py."""
    return _gemm(GEMM, args, bias=args[6])


def _why_no_unrotation(*args: Any) -> str | None:
    if args[9] != "h32":
        return f"its epilogue rotates chunks of 32 without signs back, not {args[9]}"
    return _why_not(*args)


@cuda_kernel(GEMM_MASKED_UNROTATE, TRITON_FP4, _why_no_unrotation)
def gemm_masked_unrotate_triton(*args: Any) -> torch.Tensor:
    """See ops/gemm_masked_unrotate.py."""
    transform = get_transform(args[9])
    check_shape((args[0].shape[0], args[3].shape[0]), args[6], transform)
    return _gemm(GEMM_MASKED_UNROTATE, args, mask=args[6], transform=transform)


def _gemm(
    op: str,
    args: Sequence[Any],
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    transform: Transform | None = None,
) -> torch.Tensor:
    """The product; masked and rotated back, where a mask is given."""
    from q2compile.runtime_kernels.cuda.gemm.triton_kernel import Unrotation, choose_tile, gemm_fp4

    (a, b), dtype = checked_gemm(args), args[-1]
    if (empty := without_contraction(a, b, bias, dtype)) is not None:
        return empty
    rows, columns, device = a.codes.shape[0], b.codes.shape[0], a.codes.device
    width = ceil_div(a.codes.shape[1], ALIGNMENT) * ALIGNMENT
    left, right = (
        each._replace(
            codes=padded(each.codes, each.codes.shape[0], width), scales=swizzle.swizzled(each)
        )
        for each in (a, b)
    )
    major = torch.cuda.get_device_capability(device.index)[0]
    tile = choose_tile(major, rows, columns, multiprocessors(device.index))
    unrotation = None
    if mask is not None and transform is not None:
        unrotation = Unrotation(aligned(mask.contiguous()), transform.norm)
    variant: tuple = tile, a.spec.width, dtype, bias is None or bias.dtype
    variant += transform and transform.name, width % tile.k

    def launch() -> torch.Tensor:
        with compiling(op, device, variant), on_device(device.index):
            return gemm_fp4(left, right, bias, dtype, tile, unrotation)

    size, which = (rows, columns, 2 * width), (*variant, first_launch.rows_class(rows))
    return first_launch.launched(op, TRITON_FP4, args, size, which, launch)


def _why_not_grouped(*args: Any) -> str | None:
    a, b = factors_of(args)
    wrong = unserved(a.codes.device.index) or why_not_fp4(a, b)
    if wrong is None and (a.spec.swizzled or b.spec.swizzled):
        wrong = "it reads plain scales: groups begin anywhere in tiles of 128 rows"
    return wrong


@cuda_kernel(GROUPED_GEMM, TRITON_FP4, _why_not_grouped)
def grouped_gemm_triton(*args: Any) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    from q2compile.runtime_kernels.cuda.gemm import triton_grouped_kernel
    from q2compile.runtime_kernels.cuda.gemm.triton_kernel import choose_tile

    (a, b), (offs, *_, gemm, dtype) = checked_factors(GROUPED_GEMM, args), args[6:]
    device, groups = a.codes.device, offs.shape[0]
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    if 0 in (*a.codes.shape, columns):
        return a.codes.new_zeros(result_shape(a, b, groups, gemm), dtype=dtype)
    major = torch.cuda.get_device_capability(device.index)[0]
    results = groups if gemm == "wgrad" else 1
    of_one = columns // groups if gemm == "fprop" else columns
    tile = choose_tile(major, rows, of_one, multiprocessors(device.index), results)
    left, right = (
        each._replace(codes=aligned(each.codes), scales=aligned(each.scales)) for each in (a, b)
    )
    contracted = None if gemm == "wgrad" else a.codes.shape[1]
    variant = tile, a.spec.block, b.spec.block, gemm, dtype, groups, contracted

    def launch() -> torch.Tensor:
        with compiling(GROUPED_GEMM, device, variant), on_device(device.index):
            return triton_grouped_kernel.grouped_gemm_fp4(left, right, offs, gemm, dtype, tile)

    size = rows, of_one, a.contraction
    return first_launch.launched(GROUPED_GEMM, TRITON_FP4, args, size, variant, launch)


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
