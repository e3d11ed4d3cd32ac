"""q2::quantize in torch."""

import torch

from q2compile.runtime_kernels.layout import Tiling
from q2compile.runtime_kernels.quantize.op import checked
from q2compile.runtime_kernels.quantizer import Quantized, quantize_tiles
from q2compile.runtime_kernels.registry import REFERENCE, kernel


@kernel("quantize", REFERENCE)
def quantize(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    seed: torch.Tensor | None,
    scheme: str,
    stream: int,
) -> Quantized:
    """See quantize/op.py."""
    spec = checked(x, amax, seed, scheme)
    rows = x.shape[0]
    if rows % spec.block[0]:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % spec.block[0]))
    tiling = Tiling.of(x, spec.width, transpose=False)
    codes, scales, global_scale, _ = quantize_tiles(
        tiling.cut(x), tiling, spec, amax=amax, seed=seed, stream=stream
    )
    return codes[:rows], scales, global_scale
