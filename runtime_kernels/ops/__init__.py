# SPDX-License-Identifier: Apache-2.0
"""The ops of namespace q2, one per file: schema, fake, and the torch reference, whose bits define
those of every other kernel. Imports numerics and the registry.
"""

from q2compile.runtime_kernels.ops import (
    amax,
    dequantize,
    gather_rows,
    gemm,
    gemm_masked_unrotate,
    grouped_gemm,
    grouped_mm,
    masked_unrotate,
    note,
    padded_ends,
    quantize,
    recorded,
    requantize,
    seed,
    signs,
    split_scales,
    table,
    to_e4m3,
    transpose,
)
