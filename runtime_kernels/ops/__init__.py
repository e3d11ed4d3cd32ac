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
    padded_ends,
    quantize,
    quantize_masked,
    recorded,
    requantize,
    requantize_groups,
    rht_quantize,
    rht_quantize_both,
    rht_quantize_groups,
    rht_quantize_groups_both,
    seed,
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
    "padded_ends",
    "quantize",
    "quantize_masked",
    "recorded",
    "requantize",
    "requantize_groups",
    "rht_quantize",
    "rht_quantize_both",
    "rht_quantize_groups",
    "rht_quantize_groups_both",
    "seed",
    "split_scales",
    "transpose",
]
