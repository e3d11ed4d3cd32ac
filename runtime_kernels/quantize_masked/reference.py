"""q2::quantize_masked in torch."""

import torch

from q2compile.runtime_kernels.layout import Tiling
from q2compile.runtime_kernels.quantize_masked.op import checked
from q2compile.runtime_kernels.quantizer import quantize_tiles, rotate_tiles
from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("quantize_masked", REFERENCE)
def quantize_masked(
    x: torch.Tensor, scheme: str, transform: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See quantize_masked/op.py."""
    spec, rotation = checked(x, scheme, transform)
    tiling = Tiling.of(x, max(spec.width, rotation.size), transpose=False)
    tiles = rotate_tiles(tiling.cut(x), rotation, None)
    codes, scales, global_scale, mask = quantize_tiles(tiles, tiling, spec, factor=rotation.norm)
    assert mask is not None, "checked() lets only schemes with a mask through"
    return codes, scales, global_scale, mask
