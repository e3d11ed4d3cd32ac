# SPDX-License-Identifier: Apache-2.0
"""The quantizers on CUDA. Imports jit, selfcheck, ops, numerics and the registry.

quantizers.py         quantize, requantize
plan.py               what a call launches, worked out once for each kind of operand
grouped_launch.py     several calls with one tail kernel; equal kernels are one batched launch
grouped_check.py      the choice of such a group, and its self-check
transposable.py       schemes with blocks of several rows, and the transpose of fp8 codes
rotate_quantize.py, align_scales.py    variants of the .cu files of that name
"""

from q2compile.runtime_kernels.cuda.quantize import grouped_check, quantizers

__all__ = ["grouped_check", "quantizers"]
