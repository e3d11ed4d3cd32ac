"""Numerics and kernels of q2compile. Importing this package registers the ops of namespace q2.

schemes.py, transforms.py   what an operand can be, as data
layout.py, formats.py       shapes and packing; rounding to e2m1, e4m3, e8m0
nvfp4.py, mxfp4.py          the rounding rules of the two formats, on blocks.py
quantizer.py, philox.py     tiles to codes; coins and signs
swizzle.py                  the scale layout of Blackwell's tensor cores
registry.py                 ops and the kernels behind them
<op>/op.py, reference.py    schema and fake; the torch reference, the law for other kernels
cuda/                       CUDA kernels behind some of the ops
"""

from q2compile.runtime_kernels import (
    amax,
    dequantize,
    gemm,
    grouped_gemm,
    grouped_mm,
    masked_unrotate,
    pad_groups,
    quantize,
    quantize_masked,
    requantize,
    rht_quantize,
    rht_quantize_both,
    seed,
    split_scales,
    transpose,
)

# After the references, which stand behind them: a later registration is tried first.
from q2compile.runtime_kernels import cuda  # isort: skip
from q2compile.runtime_kernels.registry import warm_up  # isort: skip

__all__ = [
    "amax",
    "cuda",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "grouped_mm",
    "masked_unrotate",
    "pad_groups",
    "quantize",
    "quantize_masked",
    "requantize",
    "rht_quantize",
    "rht_quantize_both",
    "seed",
    "split_scales",
    "transpose",
    "warm_up",
]
