"""q2::grouped_gemm: the products of quantised operands, with a weight for each group of rows.

    grouped_gemm(a_codes, a_scales, a_global, b_codes, b_scales, b_global, offs [E], a_scheme,
    b_scheme, gemm, dtype) -> matrix

Both operands are quantised along the contraction, E weights w [E, N, K] lie in one matrix, and so
do their gradients; ``gemm`` says how:

    gemm      a         b              result
    "fprop"   x [T, K]  w [E * N, K]   y [T, N]       contracts K, weight after weight
    "dgrad"   dy [T, N] w [K, E * N]   dx [T, K]      contracts N of each weight, beside each other
    "wgrad"   dy [N, T] x [K, T]       dw [E * N, K]  contracts T, group after group

``offs``: int32 ends of the groups along T. Groups must be whole blocks where T is contracted, and
each N where N is (pad_groups makes them so). Rows of no group, from offs[E - 1] on, give zero.
"""

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.schemes import get_scheme


def fake(
    a_codes,
    a_scales,
    a_global,
    b_codes,
    b_scales,
    b_global,
    offs,
    a_scheme,
    b_scheme,
    gemm,
    dtype,
):
    check_quantized("grouped_gemm", a_codes, a_scales, a_global)
    check_quantized("grouped_gemm", b_codes, b_scales, b_global)
    get_scheme(a_scheme)
    get_scheme(b_scheme)
    groups, rows, columns = offs.shape[0], a_codes.shape[0], b_codes.shape[0]
    shape = {
        "fprop": (rows, columns // groups),
        "dgrad": (rows, columns),
        "wgrad": (groups * rows, columns),
    }[gemm]
    return a_codes.new_empty(shape, dtype=dtype)


define(
    "grouped_gemm(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor b_global, Tensor offs,"
    " str a_scheme, str b_scheme, str gemm, ScalarType dtype) -> Tensor",
    fake=fake,
)
