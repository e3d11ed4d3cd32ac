"""q2::gemm: the product of two quantised matrices, A B^T.

    gemm(a_codes [M, Kp/2], a_scales, a_global, b_codes [N, Kp/2], b_scales, b_global, bias [N]?,
    a_scheme, b_scheme, dtype) -> [M, N]

out = (sum_k a*b) * (a_global * b_global) + bias, accumulated in fp32 and rounded to dtype once.
"""

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.schemes import get_scheme


def fake(a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype):
    check_quantized("gemm", a_codes, a_scales, a_global)
    check_quantized("gemm", b_codes, b_scales, b_global)
    get_scheme(a_scheme)
    get_scheme(b_scheme)
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[0]), dtype=dtype)


define(
    "gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor b_global, Tensor? bias,"
    " str a_scheme, str b_scheme, ScalarType dtype) -> Tensor",
    fake=fake,
)
