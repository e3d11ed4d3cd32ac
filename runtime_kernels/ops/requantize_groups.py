"""q2::requantize_groups: the saved codes of rows in groups, quantised again along the rows of each
group: the activation of the experts' wgrad.

    requantize_groups(codes [T, Kp/2], scales, global_scale, offs [E], padded_offs [E], seed?,
    source_scheme, scheme, transform, rows, stream)
        -> codes uint8 [rows, Tp/2], scales, global_scale fp32 0-dim

To requantize what rht_quantize_groups is to rht_quantize.
"""

import torch

from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import Quantized
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_groups, check_quantized
from q2compile.runtime_kernels.ops.rht_quantize import checked
from q2compile.runtime_kernels.ops.rht_quantize_groups import in_groups
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(
    codes,
    scales,
    global_scale,
    offs,
    padded_offs,
    seed,
    source_scheme,
    scheme,
    transform,
    rows,
    stream,
):
    check_quantized("requantize_groups", codes, scales, global_scale)
    spec, rotation = checked("requantize_groups", seed, scheme, transform)
    check_groups("requantize_groups", offs, padded_offs)
    return empty_quantized(codes, rows, padded_rows(codes.shape[0], offs.shape[0]), spec, rotation)


define(
    "requantize_groups(Tensor codes, Tensor scales, Tensor global_scale, Tensor offs,"
    " Tensor padded_offs, Tensor? seed, str source_scheme, str scheme, str transform, SymInt rows,"
    " int stream) -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("requantize_groups", REFERENCE)
def requantize_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    seed: torch.Tensor | None,
    source_scheme: str,
    scheme: str,
    transform: str,
    rows: int,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
    check_quantized("requantize_groups", codes, scales, global_scale)
    spec, rotation = checked("requantize_groups", seed, scheme, transform)
    check_groups("requantize_groups", offs, padded_offs)
    source = scaled_codes(codes, scales, get_scheme(source_scheme))[:, :rows]
    return in_groups(source, global_scale, offs, padded_offs, seed, spec, rotation, stream)
