# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs, in C++ with vectors, behind the quantizing ops and the dequantizing GEMM.
Imports ops, numerics, the registry, the self-checks, and from torch_internals which compiler
Inductor uses.

build.py       csrc/ -> a library, compiled once by that compiler
kernels.py     the entry points of the library
quantize.py, dequantize.py

Importing this registers the kernels. They are compiled or loaded when `build.begin` asks for it, or
at the first call. Where there is no compiler, the references run.
"""

from q2compile.runtime_kernels.cpu import dequantize, quantize
