"""Numerics and kernels of q2compile. Importing this package registers the ops of namespace q2.

schemes.py, transforms.py   what an operand can be, as data
layout.py, formats.py       shapes and packing; rounding to e2m1, e4m3, e8m0
nvfp4.py, mxfp4.py          the rounding rules of the two formats, on blocks.py
quantizer.py, philox.py     tiles to codes; coins and signs
swizzle.py                  the scale layout of Blackwell's tensor cores
registry.py                 ops and the kernels behind them
<op>/op.py, reference.py    schema and fake; the torch reference, the law for other kernels
"""

from q2compile.runtime_kernels import (
    amax,
    dequantize,
    gemm,
    masked_unrotate,
    quantize,
    quantize_masked,
    requantize,
    rht_quantize,
    rht_quantize_both,
    seed,
    transpose,
)

__all__ = [
    "amax",
    "dequantize",
    "gemm",
    "masked_unrotate",
    "quantize",
    "quantize_masked",
    "requantize",
    "rht_quantize",
    "rht_quantize_both",
    "seed",
    "transpose",
]
