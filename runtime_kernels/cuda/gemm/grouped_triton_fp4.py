# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm by tl.dot_scaled (triton_grouped_kernel.py): fp4 tensor cores in one launch,
for nvfp4 and mxfp4. The host does not wait for the device."""

import torch

from q2compile.runtime_kernels.cuda.calls import cuda_kernel, on_device
from q2compile.runtime_kernels.cuda.gemm import first_launch
from q2compile.runtime_kernels.cuda.gemm.operands import aligned, reads_codes, two_formats
from q2compile.runtime_kernels.cuda.gemm.triton_fp4 import compiling, unserved
from q2compile.runtime_kernels.cuda.jit.launch import multiprocessors
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.grouped_gemm import checked_grouped_gemm, result_shape
from q2compile.runtime_kernels.ops.table import GROUPED_GEMM
from q2compile.runtime_kernels.registry import TRITON_FP4


def _why_not(*args) -> str | None:
    a_scheme, b_scheme = args[7:9]
    wrong = unserved(args[0].device.index) or two_formats(a_scheme, b_scheme)
    wrong = wrong or reads_codes(a_scheme, b_scheme)
    if wrong is None and (get_scheme(a_scheme).swizzled or get_scheme(b_scheme).swizzled):
        wrong = "it reads plain scales: groups begin anywhere in tiles of 128 rows"
    return wrong


@cuda_kernel("grouped_gemm", TRITON_FP4, _why_not)
def grouped_gemm_triton(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, offs, a_scheme, b_scheme, gemm, dtype
) -> torch.Tensor:
    """See ops/grouped_gemm.py."""
    from q2compile.runtime_kernels.cuda.gemm import triton_grouped_kernel
    from q2compile.runtime_kernels.cuda.gemm.triton_kernel import choose_tile

    operands = (a_codes, a_scales, a_global, b_codes, b_scales, b_global)
    specs = checked_grouped_gemm(*operands, a_scheme, b_scheme)
    index, groups = a_codes.device.index, offs.shape[0]
    rows, columns = a_codes.shape[0], b_codes.shape[0]
    if 0 in (*a_codes.shape, columns):
        return a_codes.new_zeros(result_shape(a_codes, b_codes, groups, gemm), dtype=dtype)
    major = torch.cuda.get_device_capability(index)[0]
    results = groups if gemm == "wgrad" else 1
    of_one = columns // groups if gemm == "fprop" else columns
    tile = choose_tile(major, rows, of_one, multiprocessors(index), results)
    a = aligned(a_codes), aligned(a_scales), a_global
    b = aligned(b_codes), aligned(b_scales), b_global
    contracted = None if gemm == "wgrad" else a_codes.shape[1]
    variant = tile, *(spec.block for spec in specs), gemm, dtype, groups, contracted
    first = None
    if first_launch.needed(rows, of_one, 2 * a_codes.shape[1]):
        call = (*operands, offs, a_scheme, b_scheme, gemm, dtype)
        device = a_codes.device
        first = first_launch.begin(GROUPED_GEMM, TRITON_FP4, device, *variant, call=call)
    with first_launch.marked(first):
        with compiling(GROUPED_GEMM, a_codes.device, variant), on_device(index):
            out = triton_grouped_kernel.grouped_gemm_fp4(a, b, offs, specs, gemm, dtype, tile)
        if first is not None:
            factors = (
                first_launch.Factor(a_codes, a_scales, a_global, specs[0]),
                first_launch.Factor(b_codes, b_scales, b_global, specs[1]),
            )
            first_launch.compare_grouped(first, out, *factors, offs, gemm)
    return out
