"""q2::rht_quantize in torch."""

import torch

from q2compile.runtime_kernels.amax.op import amax
from q2compile.runtime_kernels.checks import check_operand
from q2compile.runtime_kernels.layout import Tiling
from q2compile.runtime_kernels.quantizer import Quantized, quantize_tiles, rotate_tiles
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.rht_quantize.op import checked
from q2compile.runtime_kernels.schemes import Scheme
from q2compile.runtime_kernels.transforms import Transform


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
    return rotate_and_quantize(x, 1.0, seed, spec, rotation, transpose, stream)


def rotate_and_quantize(
    x: torch.Tensor,
    factor: float | torch.Tensor,
    seed: torch.Tensor | None,
    spec: Scheme,
    rotation: Transform,
    transpose: bool,
    stream: int,
) -> Quantized:
    """The same for x * factor, where the factor may be applied late (quantizer.py)."""
    tiling = Tiling.of(x, max(spec.width, rotation.size), transpose=transpose)
    tiles = rotate_tiles(tiling.cut(x), rotation, seed)
    largest = amax(tiles) if spec.takes_amax else None
    codes, scales, global_scale, _ = quantize_tiles(
        tiles,
        tiling,
        spec,
        factor=factor * rotation.norm,
        amax=largest,
        seed=seed,
        stream=stream,
    )
    return codes, scales, global_scale
