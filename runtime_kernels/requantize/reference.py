"""q2::requantize in torch."""

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.dequantize.reference import dequantize
from q2compile.runtime_kernels.quantizer import Quantized
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.rht_quantize.reference import rht_quantize


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
    """See requantize/op.py."""
    check_quantized("requantize", codes, scales, global_scale)
    source = dequantize(codes, scales, global_scale, source_scheme, rows, torch.float32)
    return rht_quantize(source, seed, scheme, transform, True, stream)
