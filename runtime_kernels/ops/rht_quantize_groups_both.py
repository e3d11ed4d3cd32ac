"""q2::rht_quantize_groups_both: the gradient of a grouped product, rotated and quantised along its
rows and along the rows of each group, from one read.

    rht_quantize_groups_both(x [T, C], offs [E], padded_offs [E], row_seed?, col_seed?, scheme,
    transform, stream)
        -> codes [T, Cp/2], scales, global_scale;  codes [C, Tp/2], scales, global_scale

The same six tensors as rht_quantize(x, row_seed, ..., transpose=False, stream) and
rht_quantize_groups(x, offs, padded_offs, col_seed, ..., stream).
"""

import torch

from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.ops.argument_checks import check_groups, check_operand
from q2compile.runtime_kernels.ops.rht_quantize import checked, rht_quantize
from q2compile.runtime_kernels.ops.rht_quantize_groups import rht_quantize_groups
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream):
    for seed in (row_seed, col_seed):
        spec, rotation = checked("rht_quantize_groups_both", seed, scheme, transform)
    check_operand("rht_quantize_groups_both", x)
    check_groups("rht_quantize_groups_both", offs, padded_offs)
    rows, cols = x.shape
    return (
        *empty_quantized(x, rows, cols, spec, rotation),
        *empty_quantized(x, cols, padded_rows(rows, offs.shape[0]), spec, rotation),
    )


define(
    "rht_quantize_groups_both(Tensor x, Tensor offs, Tensor padded_offs, Tensor? row_seed,"
    " Tensor? col_seed, str scheme, str transform, int stream)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("rht_quantize_groups_both", REFERENCE)
def rht_quantize_groups_both(
    x: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    row_seed: torch.Tensor | None,
    col_seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
) -> tuple[torch.Tensor, ...]:
    """The reference: see the top of this file."""
    return (
        *rht_quantize(x, row_seed, scheme, transform, False, stream),
        *rht_quantize_groups(x, offs, padded_offs, col_seed, scheme, transform, stream),
    )
