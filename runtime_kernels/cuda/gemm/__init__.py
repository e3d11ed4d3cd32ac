# SPDX-License-Identifier: Apache-2.0
"""q2::gemm on CUDA, by four kernels, and the grouped GEMMs. Imports jit, other_ops, selfcheck,
ops, numerics, registry.

cublaslt_fp4.py   codes and scales on fp4 tensor cores, by cuBLASLt (cublaslt.py): nvfp4
triton_fp4.py     the same by tl.dot_scaled: nvfp4, mxfp4 (triton_kernel.py); also grouped
                  (triton_grouped_kernel.py), and q2::gemm_masked_unrotate
scaled_mm.py      codes of fp8 on fp8 tensor cores, by torch; also grouped
cuda_bf16.py      the dequantized operands in bf16, by cuBLAS, on any GPU; also grouped
grouped_mm.py     torch's grouped product of bf16 matrices
first_launch.py   the first large product of an algorithm or tile, compared with a BF16 GEMM
operands.py       what they require of their operands
swizzle.py        scales in the order that fp4 tensor cores read

They are tried in this order: a later registration comes first.
"""

from q2compile.runtime_kernels.cuda.gemm import cuda_bf16  # isort: skip
from q2compile.runtime_kernels.cuda.gemm import triton_fp4  # isort: skip
from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4  # isort: skip
from q2compile.runtime_kernels.cuda.gemm import scaled_mm  # isort: skip
