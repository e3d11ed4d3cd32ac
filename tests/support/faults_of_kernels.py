# SPDX-License-Identifier: Apache-2.0
"""Faults to plant (planted_faults.py) in the CUDA kernels, and in how they are called."""

from __future__ import annotations

from tests.support.fault import fault

OF_KERNELS = (
    fault(
        "random bits of ragged rows of scales are off by some",
        "runtime_kernels/cuda/csrc/align_scales.cu",
        "drop_first((int)octet.i & 3, drawn);",
        "drop_first(0, drawn);",
        "runtime_kernels/cuda/test_cuda_emulated.py",
    ),
    fault(
        "transposed codes read another word of shared memory",
        "runtime_kernels/cuda/csrc/transpose.cu",
        "tile[(8 * eight + i) * kWords + (word ^ eight)]",
        "tile[(8 * eight + i) * kWords + word]",
        "runtime_kernels/cuda/test_cuda_emulated.py",
    ),
    fault(
        "a NaN in a block of MXFP4 is a large number",
        "runtime_kernels/cuda/csrc/include/rounding.cuh",
        "return {largest <= kHuge ? byte : 255,",
        "return {byte,",
        "runtime_kernels/cuda/test_nonfinite_emulated.py",
    ),
    fault(
        "rows of 16x16 blocks are dequantized by the scales of other rows",
        "runtime_kernels/cuda/csrc/dequantize.cu",
        "scale_at = (row >> p.row_shift) *",
        "scale_at = row *",
        "runtime_kernels/cuda/test_cuda_emulated.py",
    ),
    fault(
        "MS-EDEN's kernel leaves its scales as they were before the projection",
        "runtime_kernels/cuda/csrc/include/ms_eden.cuh",
        "return mul(pseudo, quotient);",
        "return pseudo;",
        "runtime_kernels/cuda/test_cuda_emulated.py",
    ),
    fault(
        "on a Blackwell the two codes of a byte change places",
        "runtime_kernels/cuda/csrc/include/ptx.cuh",
        "cvt.rn.satfinite.e2m1x2.f32 p, %2, %1;",
        "cvt.rn.satfinite.e2m1x2.f32 p, %1, %2;",
        "runtime_kernels/cuda/test_ptx_kernels.py",
    ),
    fault(
        "on a Blackwell two of eight codes are dequantized twice",
        "runtime_kernels/cuda/csrc/include/ptx.cuh",
        "cvt.rn.f16x2.e2m1x2 %3, s; }",
        "cvt.rn.f16x2.e2m1x2 %3, r; }",
        "runtime_kernels/cuda/test_ptx_kernels.py",
    ),
    fault(
        "dbias's kernel leaves out the last warp",
        "runtime_kernels/cuda/csrc/include/sums.cuh",
        "for (int i = 1; i < kWarps; ++i) sum +=",
        "for (int i = 1; i < kWarps - 1; ++i) sum +=",
        "runtime_kernels/cuda/test_dbias.py",
    ),
    fault(
        "views of tensors launch at the beginning of their storage",
        "runtime_kernels/cuda/calls.py",
        "slot = place[field.tensor] + field.byte_offset",
        "slot = place[field.tensor]",
        "runtime_kernels/cuda/test_calls.py",
        "runtime_kernels/cuda/test_grouped_launch.py",
    ),
    fault(
        "a batched launch has the thread blocks of the smallest operand",
        "runtime_kernels/cuda/quantize/grouped_launch.py",
        "thread_blocks=max(each.thread_blocks for each",
        "thread_blocks=min(each.thread_blocks for each",
        "runtime_kernels/cuda/test_grouped_launch.py",
    ),
    fault(
        "rows of no group are codes of fp8, not zeros",
        "runtime_kernels/cuda/csrc/transposable.cu",
        "    if (rows.tail) codes[i] = {0, 0};\n",
        "",
        "runtime_kernels/cuda/test_transposable.py",
    ),
)
