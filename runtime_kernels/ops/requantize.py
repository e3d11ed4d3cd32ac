"""q2::requantize: a saved operand, quantised again along its other dimension, for a GEMM of the
backward pass.

    requantize(codes [T, Kp/2], scales, global_scale, seed?, source_scheme, scheme, transform, rows,
    stream)
        -> codes uint8 [rows, Tp/2], scales, global_scale fp32 0-dim

Dequantises, drops the padding of the source ([:, :rows]), transposes, rotates and quantises along
the source's rows T: nothing of the source need exist in more than 4 bits outside the op.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import Quantized
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.ops.rht_quantize import checked, rotate_and_quantize
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream):
    check_quantized("requantize", codes, scales, global_scale)
    spec, rotation = checked("requantize", seed, scheme, transform)
    return empty_quantized(codes, rows, codes.shape[0], spec, rotation)


define(
    "requantize(Tensor codes, Tensor scales, Tensor global_scale, Tensor? seed,"
    " str source_scheme, str scheme, str transform, SymInt rows, int stream)"
    " -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("requantize", REFERENCE)
def requantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    seed: torch.Tensor | None,
    source_scheme: str,
    scheme: str,
    transform: str,
    rows: int,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
    check_quantized("requantize", codes, scales, global_scale)
    spec, rotation = checked("requantize", seed, scheme, transform)
    source = scaled_codes(codes, scales, get_scheme(source_scheme))[:, :rows]
    return rotate_and_quantize(source, global_scale, seed, spec, rotation, True, stream)
