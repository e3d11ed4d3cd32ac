# SPDX-License-Identifier: Apache-2.0
"""The quantizers on CUDA. Imports jit, selfcheck, ops, numerics and the registry.

quantizers.py         quantize, requantize
split_scales.py       split_scales
fp8.py                the quantizer of scheme fp8, and the transpose of its codes
plan.py               what a call launches, worked out once for each kind of operand
grouped_launch.py     several calls with one tail kernel; equal kernels are one batched launch
grouped_check.py      the self-check of such a group
rotate_quantize.py, align_scales.py    variants of the .cu files of that name;  rule.py  their rule
"""

from q2compile.runtime_kernels.cuda.quantize import quantizers, split_scales

__all__ = ["quantizers", "split_scales"]
