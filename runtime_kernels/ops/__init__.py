"""The ops of namespace q2, one a file: schema, fake, and the torch reference, which is the law for
every other kernel. Imports numerics and the registry.
"""

from q2compile.runtime_kernels.ops import (
    amax,
    dequantize,
    gemm,
    grouped_gemm,
    grouped_mm,
    masked_unrotate,
    note,
    pad_groups,
    quantize,
    quantize_masked,
    recorded,
    requantize,
    rht_quantize,
    rht_quantize_both,
    seed,
    signs,
    split_scales,
    transpose,
)

__all__ = [
    "amax",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "grouped_mm",
    "masked_unrotate",
    "note",
    "pad_groups",
    "quantize",
    "quantize_masked",
    "recorded",
    "requantize",
    "rht_quantize",
    "rht_quantize_both",
    "seed",
    "signs",
    "split_scales",
    "transpose",
]
