# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm by tl.dot_scaled (triton_grouped_kernel.py): fp4 tensor cores in one launch,
for nvfp4 and mxfp4. The host does not wait for the device."""

from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import first_launch
from q2compile.runtime_kernels.cuda.gemm.operands import aligned, why_not_fp4
from q2compile.runtime_kernels.cuda.gemm.triton_fp4 import compiling, unserved
from q2compile.runtime_kernels.cuda.jit.launch import multiprocessors
from q2compile.runtime_kernels.ops.gemm import checked_factors, factors_of
from q2compile.runtime_kernels.ops.grouped_gemm import result_shape
from q2compile.runtime_kernels.ops.table import GROUPED_GEMM
from q2compile.runtime_kernels.registry import TRITON_FP4


def _why_not(*args: Any) -> str | None:
    a, b = factors_of(args)
    wrong = unserved(a.codes.device.index) or why_not_fp4(a, b)
    if wrong is None and (a.spec.swizzled or b.spec.swizzled):
        wrong = "it reads plain scales: groups begin anywhere in tiles of 128 rows"
    return wrong


@cuda_kernel(GROUPED_GEMM, TRITON_FP4, _why_not)
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
    first = None
    if first_launch.needed(rows, of_one, a.contraction):
        first = first_launch.begin(GROUPED_GEMM, TRITON_FP4, args, *variant)

    def launch() -> torch.Tensor:
        with compiling(GROUPED_GEMM, device, variant), on_device(device.index):
            return triton_grouped_kernel.grouped_gemm_fp4(left, right, offs, gemm, dtype, tile)

    return first_launch.launched(first, args, launch)
