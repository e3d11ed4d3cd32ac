"""q2::rht_quantize_groups: rows in groups, rotated and quantised along the rows of each group: an
operand of the experts' wgrad, which contracts the tokens.

    rht_quantize_groups(x [T, C], offs [E], padded_offs [E], seed?, scheme, transform, stream)
        -> codes uint8 [C, Tp/2], scales, global_scale fp32 0-dim

offs are the ends of the groups, int32 on the device; padded_offs those of the padded layout, where
each group is whole chunks of 128 rows (numerics/groups.py, padded_ends), and Tp its rows. Defined
as that layout, rotated and quantised as by rht_quantize with transpose; rows of no group are zeros
there, none of them negative. MS-EDEN after a rotation by 128 has short chunks spread, so that it is
unbiased there too.
"""

import torch

from q2compile.runtime_kernels.numerics.groups import clear_tail, lay_out, padded_rows, spreads
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import Quantized
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform
from q2compile.runtime_kernels.ops.argument_checks import check_groups, check_operand
from q2compile.runtime_kernels.ops.rht_quantize import checked, rotate_and_quantize
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(x, offs, padded_offs, seed, scheme, transform, stream):
    spec, rotation = checked("rht_quantize_groups", seed, scheme, transform)
    check_operand("rht_quantize_groups", x)
    check_groups("rht_quantize_groups", offs, padded_offs)
    return empty_quantized(x, x.shape[1], padded_rows(x.shape[0], offs.shape[0]), spec, rotation)


define(
    "rht_quantize_groups(Tensor x, Tensor offs, Tensor padded_offs, Tensor? seed, str scheme,"
    " str transform, int stream) -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("rht_quantize_groups", REFERENCE)
def rht_quantize_groups(
    x: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
    spec, rotation = checked("rht_quantize_groups", seed, scheme, transform)
    check_operand("rht_quantize_groups", x)
    check_groups("rht_quantize_groups", offs, padded_offs)
    return in_groups(x, 1.0, offs, padded_offs, seed, spec, rotation, stream)


def in_groups(
    x: torch.Tensor,
    factor: float | torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    seed: torch.Tensor | None,
    spec: Scheme,
    rotation: Transform,
    stream: int,
) -> Quantized:
    """The same for x * factor."""
    laid, shares = lay_out(x, offs, padded_offs, spread=spreads(spec, rotation))
    codes, scales, global_scale = rotate_and_quantize(
        laid, factor, seed, spec, rotation, True, stream, shares
    )
    return clear_tail(codes, padded_offs), scales, global_scale
