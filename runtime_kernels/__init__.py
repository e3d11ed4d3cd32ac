"""Numerics and kernels of q2compile. Importing this package registers the ops of namespace q2
(torch.ops.q2.*).

schemes.py, transforms.py   what an operand can be, as data
layout.py, formats.py       shapes, packing, rounding to e2m1, e4m3, e8m0
blocks.py                   quantising blocks; philox.py: its coins
registry.py                 ops and the kernels behind them
<op>/op.py, reference.py    schema and fake; the torch reference, the law for other kernels
"""

from q2compile.runtime_kernels import (
    amax,
    dequantize,
    gemm,
    quantize,
    requantize,
    rht_quantize,
    seed,
)

__all__ = ["amax", "dequantize", "gemm", "quantize", "requantize", "rht_quantize", "seed"]
