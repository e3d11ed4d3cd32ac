# SPDX-License-Identifier: Apache-2.0
"""Kernels for NVIDIA GPUs, behind the ops. Imports ops, numerics and the registry.

jit/            a .cu file and its defines -> a cubin -> a launch
quantize/       the quantizers: rotating or not, masked, and the scales of Inductor's kernels
gemm/           q2::gemm by cuBLASLt, Triton or cuBLAS
dequantize.py, masked_unrotate.py, signs.py, to_e4m3.py, transpose.py
calls.py        what a call of an op launches; call_site.py, such a call in generated code
recent_launches.py    the last launches, named when the device fails
known_bad.py    versions of libraries that are at fault
emulated.py     what is emulated, and why
csrc/           the sources, without headers of CUDA's; include/ptx.cuh holds all their inline PTX

Importing this registers the kernels; nothing of CUDA is loaded before the first call.
"""

from q2compile.runtime_kernels.cuda import (
    dequantize,
    emulated,
    gemm,
    masked_unrotate,
    quantize,
    signs,
    to_e4m3,
    transpose,
)
