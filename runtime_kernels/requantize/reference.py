"""q2::requantize in torch."""

import torch

from q2compile.runtime_kernels.checks import check_quantized
from q2compile.runtime_kernels.dequantize.reference import scaled_codes
from q2compile.runtime_kernels.quantizer import Quantized
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.rht_quantize.op import checked
from q2compile.runtime_kernels.rht_quantize.reference import rotate_and_quantize
from q2compile.runtime_kernels.schemes import get_scheme


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
    spec, rotation = checked("requantize", seed, scheme, transform)
    source = scaled_codes(codes, scales, get_scheme(source_scheme))[:, :rows]
    return rotate_and_quantize(source, global_scale, seed, spec, rotation, True, stream)
