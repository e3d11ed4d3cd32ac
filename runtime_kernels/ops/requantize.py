"""q2::requantize: a saved operand, quantised again along its other dimension, for a GEMM of the
backward pass.

    requantize(codes [T, Kp/2], scales, global_scale, seed?, source_scheme, scheme, transform, rows,
    stream)
        -> codes uint8 [rows, Tp/2], scales, global_scale fp32 0-dim

Dequantises, drops the padding of the source ([:, :rows]), transposes, rotates and quantises along
the source's rows T: nothing of the source need exist in more than 4 bits outside the op.
"""

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.layout import empty_quantized
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.rht_quantize.op import checked


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
