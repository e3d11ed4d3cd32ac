# SPDX-License-Identifier: Apache-2.0
"""Kernels for NVIDIA GPUs, behind the ops. Imports ops, numerics and the registry.

jit/            a .cu file and its defines -> a cubin -> a launch
quantize/       the quantizers: rotating or not, and masked
gemm/           q2::gemm by cuBLASLt, Triton or cuBLAS
other_ops.py    dequantize, masked_unrotate, signs, split_scales, to_e4m3, transpose
calls.py        what a call of an op launches; call_site.py, such a call in generated code
recent_launches.py    the last launches, named when the device fails
known_bad.py    versions of libraries that are at fault
emulated.py     what is emulated, and why
csrc/           the sources, without headers of CUDA's; include/ptx.cuh holds all their inline PTX

Importing this registers the kernels; nothing of CUDA is loaded before the first call.
"""

from q2compile.runtime_kernels.cuda import gemm, other_ops, quantize
