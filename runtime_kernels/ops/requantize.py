# SPDX-License-Identifier: Apache-2.0
"""q2::requantize: quantizes a saved operand along its other dimension, for a GEMM of the backward
pass.

    requantize(source [T, Kp/2], scales, global_scale, *, source_scheme, scheme, transform, rows,
               columnwise_seed=None, rng_offset=0, offs=None, padded_offs=None, by_scales=False,
               recorded=False) -> Tensor[]

Outputs: codes uint8 [rows, Tp/2], scales, global_scale fp32 0-dim; if recorded, their statistics.

Dequantizes the source's codes, drops their padding ([:, :rows]), and quantizes the result
columnwise as q2::quantize does, also in groups. Outside the op the source exists in 4 bits alone. A
zero that its rotation makes is +0 (numerics/quantize_tiles.py, rotate_tiles).

by_scales: the source is the matrix [T, rows] itself, and is rounded to the codes that source_scheme
gives it with these scales. So the codes need not be saved, and the scales not searched for again.
The bits are those of requantize(quantize(x)), except in blocks whose scale is 2^-6 or less, where
e4m3's subnormals begin: quantize rounds the codes before such a scale, this op after it
(numerics/scaled_codes.py).
"""

from typing import Any

import torch

from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.scaled_codes import rounded_to_scales, scaled_codes
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.ops.argument_checks import (
    check_groups,
    check_operand,
    check_quantized,
    check_scalar,
    check_seed,
)
from q2compile.runtime_kernels.ops.quantize import (
    quantized_in_groups,
    rotate_and_quantize,
    square_blocks,
)
from q2compile.runtime_kernels.ops.recorded import empty_statistics, recorded
from q2compile.runtime_kernels.ops.table import REQUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import define


def rounds_by_scales(scheme: Scheme) -> bool:
    """Whether the codes of a scheme follow from its scales. They do for rounding to nearest, in
    blocks of one row, with a power of two as global scale: codes were rounded by these scales."""
    plain = scheme.format == "nvfp4" and scheme.rounding == "rtn" and not scheme.dequantized
    return plain and scheme.global_scale == "pow2" and scheme.block[0] == 1


def checked_requantize(call: QuantizerCall) -> QuantizerCall:
    """The call, once its arguments are checked.

    Raises:
        ValueError: a scheme or the transform is unknown; the seed is missing.
    """
    source, scales, global_scale = (call.args[name] for name in call.spec.source)
    if call.by_scales:
        check_operand(REQUANTIZE, source)
        check_scalar(REQUANTIZE, "the global scale", global_scale)
        rounds = call.source_scheme is not None and rounds_by_scales(call.source_scheme)
        right = rounds and not call.grouped and scales.element_size() == 1 and scales.dim() == 2
        assert right, f"{call.args['source_scheme']} is not rounded by {scales.dtype} scales"
    else:
        check_quantized(REQUANTIZE, source, scales, global_scale)
    check_seed(REQUANTIZE, call.args["columnwise_seed"], call.scheme, call.transform)
    if call.scheme.block[0] != 1:
        raise square_blocks(REQUANTIZE, call.scheme)
    if call.grouped:
        check_groups(REQUANTIZE, call.args["offs"], call.args["padded_offs"])
    return call


def fake(*args: Any) -> list[torch.Tensor]:
    call = checked_requantize(QuantizerCall.of(REQUANTIZE, args))
    height = call.x.shape[0]
    if call.grouped:
        height = padded_rows(height, call.args["offs"].shape[0])
    made = empty_quantized(call.x, call.args["rows"], height, call.scheme, call.transform)
    return [*made, *empty_statistics(call)]


@define(
    "requantize(Tensor source, Tensor scales, Tensor global_scale, *, str source_scheme,"
    " str scheme, str transform, SymInt rows, Tensor? columnwise_seed=None, int rng_offset=0,"
    " Tensor? offs=None, Tensor? padded_offs=None, bool by_scales=False, bool recorded=False)"
    " -> Tensor[]",
    fake=fake,
)
def requantize(*args: Any) -> list[torch.Tensor]:
    """The reference: see the top of this file."""
    call = checked_requantize(QuantizerCall.of(REQUANTIZE, args))
    if call.recorded:
        return recorded(call)
    source, scales, global_scale = (call.args[name] for name in call.spec.source)
    scheme = call.source_scheme
    assert scheme is not None
    if call.by_scales:
        x = rounded_to_scales(source, scales, global_scale, scheme)
    else:
        x = scaled_codes(source, scales, scheme)[:, : call.args["rows"]]
    if call.grouped:
        return list(quantized_in_groups(call, x, global_scale))
    drawn = call.args["columnwise_seed"], call.args["rng_offset"]
    how = call.scheme, call.transform
    parts = rotate_and_quantize(x, global_scale, *drawn, *how, True)
    return [part for part in parts[:3] if part is not None]
