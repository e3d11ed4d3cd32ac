"""q2::quantize in torch."""

import torch

from q2compile.runtime_kernels.blocks import Quantized, quantize_tiles
from q2compile.runtime_kernels.layout import Tiling
from q2compile.runtime_kernels.quantize.op import checked
from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("quantize", REFERENCE)
def quantize(
    x: torch.Tensor, amax: torch.Tensor | None, seed: torch.Tensor | None, scheme: str, stream: int
) -> Quantized:
    """See quantize/op.py."""
    spec = checked(x, amax, seed, scheme)
    tiling = Tiling.of(x, spec.width, transpose=False)
    return quantize_tiles(tiling.cut(x), tiling, spec, amax=amax, seed=seed, stream=stream)
