"""The quantisers on CUDA. Imports jit, selfcheck, ops, numerics and the registry.

rotating_ops.py       quantize, rht_quantize, rht_quantize_both, requantize
grouped_ops.py        rht_quantize_groups, rht_quantize_groups_both, requantize_groups
summed.py             rht_quantize_summed, rht_quantize_both_summed
quantize_masked.py    quantize_masked
split_scales.py       split_scales
plan.py               what a call launches, worked out once for each kind of operand
together.py           calls that end in one launch, and of which equal launches are one
rotate_quantize.py, align_scales.py    variants of the .cu files of that name;  rule.py  their rule
"""

from q2compile.runtime_kernels.cuda.quantize import (
    grouped_ops,
    quantize_masked,
    rotating_ops,
    split_scales,
    summed,
)

__all__ = ["grouped_ops", "quantize_masked", "rotating_ops", "split_scales", "summed"]
