"""q2::rht_quantize_both: a matrix rotated and quantised along its rows and along its columns, from
one read.

    rht_quantize_both(x [M, K], row_seed?, col_seed?, scheme, transform, stream)
        -> codes [M, Kp/2], scales, global_scale;  codes [K, Mp/2], scales, global_scale

The same six tensors as rht_quantize(x, row_seed, ..., transpose=False, stream) and
rht_quantize(x, col_seed, ..., transpose=True, stream): a gradient is an operand of both GEMMs of
the backward pass, and reading it twice is most of what quantising it costs.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.ops.argument_checks import check_operand
from q2compile.runtime_kernels.ops.rht_quantize import checked, rht_quantize
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(x, row_seed, col_seed, scheme, transform, stream):
    for seed in (row_seed, col_seed):
        spec, rotation = checked("rht_quantize_both", seed, scheme, transform)
    check_operand("rht_quantize_both", x)
    rows, cols = x.shape
    return (
        *empty_quantized(x, rows, cols, spec, rotation),
        *empty_quantized(x, cols, rows, spec, rotation),
    )


define(
    "rht_quantize_both(Tensor x, Tensor? row_seed, Tensor? col_seed, str scheme, str transform,"
    " int stream) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("rht_quantize_both", REFERENCE)
def rht_quantize_both(
    x: torch.Tensor,
    row_seed: torch.Tensor | None,
    col_seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
) -> tuple[torch.Tensor, ...]:
    """The reference: see the top of this file."""
    return (
        *rht_quantize(x, row_seed, scheme, transform, False, stream),
        *rht_quantize(x, col_seed, scheme, transform, True, stream),
    )
