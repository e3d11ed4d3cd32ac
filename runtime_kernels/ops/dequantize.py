# SPDX-License-Identifier: Apache-2.0
"""q2::dequantize: the values of a quantized matrix.

    dequantize(codes [M, Kp/2], scales, global_scale?, scheme, cols, dtype) -> [M, cols]

Codes of fp8 are float8_e4m3fn [M, Kp], and their block scales are empty.

Without a global scale the result is code * scale, which is exact in bf16 for every scheme.

value = (e2m1(code) * scale) * global_scale in fp32, the first product exact, then one rounding to
dtype. With a power of two as global scale the value is exact in bf16: e2m1 has 2 significant bits
and e4m3 4, so the product has at most 6 and bf16 holds 8.
"""

import torch

from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import define


def fake(codes, scales, global_scale, scheme, cols, dtype):
    check_quantized("dequantize", codes, scales, global_scale, dtype=get_scheme(scheme).codes_dtype)
    return codes.new_empty((codes.shape[0], cols), dtype=dtype)


@define(
    "dequantize(Tensor codes, Tensor scales, Tensor? global_scale, str scheme, SymInt cols,"
    " ScalarType dtype) -> Tensor",
    fake=fake,
)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The reference: see the top of this file."""
    spec = get_scheme(scheme)
    check_quantized("dequantize", codes, scales, global_scale, dtype=spec.codes_dtype)
    values = scaled_codes(codes, scales, spec)
    if global_scale is not None:
        values.mul_(global_scale)
    return values[:, :cols].to(dtype, memory_format=torch.contiguous_format)
