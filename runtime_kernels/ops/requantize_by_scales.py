"""q2::requantize_by_scales: what q2::requantize makes of an operand's codes, from the operand
itself and the scales that its codes have: nobody need keep the codes, or search for the scales
again.

    requantize_by_scales(x [T, K], scales, global_scale, seed?, source_scheme, scheme, transform,
    stream)
        -> codes uint8 [K, Tp/2], scales, global_scale fp32 0-dim

Rounds x to the codes that source_scheme gives it under these scales, and requantises those. The
bits are those of requantize(quantize(x)) but for blocks whose scale is 2^-6 or less, where e4m3's
subnormals begin: codes were rounded before such a scale was, and here afterwards
(numerics/scaled_codes.py).
"""

import torch

from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import Quantized
from q2compile.runtime_kernels.numerics.scaled_codes import rounded_to_scales
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_operand, check_scales
from q2compile.runtime_kernels.ops.rht_quantize import checked, rotate_and_quantize
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel

_OP = "requantize_by_scales"


def rounds_by_scales(scheme: str) -> bool:
    """Whether the codes of a scheme follow from its scales: to the nearest, in blocks of one row,
    with a power of two as global scale, so that a scale is what the codes were rounded with."""
    spec = get_scheme(scheme)
    plain = spec.format == "nvfp4" and spec.rounding == "rtn" and not spec.widened
    return plain and spec.global_scale == "pow2" and spec.block[0] == 1


def checked_source(
    x: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, source_scheme: str
) -> Scheme:
    """The scheme of the source by name, after checking the arguments against it.

    Raises:
        ValueError: x is no matrix of floats, the others are no scales; or a scheme whose codes do
            not follow from them.
    """
    check_operand(_OP, x)
    check_scales(_OP, scales, global_scale)
    if not rounds_by_scales(source_scheme):
        raise ValueError(
            f"q2::{_OP} takes a source in an nvfp4 scheme that rounds to the nearest in blocks of "
            f"one row, with a power of two as global scale, got {source_scheme}: give "
            "q2::requantize its codes."
        )
    return get_scheme(source_scheme)


def fake(x, scales, global_scale, seed, source_scheme, scheme, transform, stream):
    checked_source(x, scales, global_scale, source_scheme)
    spec, rotation = checked(_OP, seed, scheme, transform)
    return empty_quantized(x, x.shape[1], x.shape[0], spec, rotation)


define(
    "requantize_by_scales(Tensor x, Tensor scales, Tensor global_scale, Tensor? seed,"
    " str source_scheme, str scheme, str transform, int stream) -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel(_OP, REFERENCE)
def requantize_by_scales(
    x: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    seed: torch.Tensor | None,
    source_scheme: str,
    scheme: str,
    transform: str,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
    source_spec = checked_source(x, scales, global_scale, source_scheme)
    spec, rotation = checked(_OP, seed, scheme, transform)
    source = rounded_to_scales(x, scales, global_scale, source_spec)
    return rotate_and_quantize(source, global_scale, seed, spec, rotation, True, stream)
