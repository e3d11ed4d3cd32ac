"""q2::rht_quantize in torch."""

import torch

from q2compile.runtime_kernels.amax.op import amax
from q2compile.runtime_kernels.checks import check_operand
from q2compile.runtime_kernels.layout import Tiling
from q2compile.runtime_kernels.quantizer import Quantized, quantize_tiles, rotate_tiles
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.rht_quantize.op import checked


@kernel("rht_quantize", REFERENCE)
def rht_quantize(
    x: torch.Tensor,
    seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    transpose: bool,
    stream: int,
) -> Quantized:
    """See rht_quantize/op.py."""
    spec, rotation = checked("rht_quantize", seed, scheme, transform)
    check_operand("rht_quantize", x)
    tiling = Tiling.of(x, max(spec.width, rotation.size), transpose=transpose)
    tiles = rotate_tiles(tiling.cut(x), rotation, seed)
    largest = amax(tiles) if spec.takes_amax else None
    return quantize_tiles(tiles, tiling, spec, amax=largest, seed=seed, stream=stream)[:3]
