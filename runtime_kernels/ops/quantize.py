"""q2::quantize: rounds a matrix to a 4-bit format along its last dimension, block by block, without
a rotation.

    quantize(x [M, K], amax?, seed?, scheme, stream) -> codes uint8 [M, Kp/2], scales, global_scale
    fp32 0-dim

Formats, packing and shapes: schemes.py and layout.py. K is padded with zeros inside, to whole
blocks.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import Tiling, empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import Quantized, quantize_tiles
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.argument_checks import check_amax, check_operand, check_seed
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def checked(
    x: torch.Tensor, amax: torch.Tensor | None, seed: torch.Tensor | None, scheme: str
) -> Scheme:
    """The scheme by name, after checking the arguments against it.

    Raises:
        ValueError: x is not a float matrix; the scheme is unknown; amax or seed is missing, or amax
            superfluous.
    """
    spec = get_scheme(scheme)
    check_operand("quantize", x)
    check_amax("quantize", amax, spec)
    check_seed("quantize", seed, spec, get_transform("none"))
    return spec


def fake(x, amax, seed, scheme, stream):
    spec = checked(x, amax, seed, scheme)
    return empty_quantized(x, x.shape[0], x.shape[1], spec, get_transform("none"))


define(
    "quantize(Tensor x, Tensor? amax, Tensor? seed, str scheme, int stream)"
    " -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("quantize", REFERENCE)
def quantize(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    seed: torch.Tensor | None,
    scheme: str,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
    spec = checked(x, amax, seed, scheme)
    rows = x.shape[0]
    if rows % spec.block[0]:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % spec.block[0]))
    tiling = Tiling.of(x, spec.width, transpose=False)
    codes, scales, global_scale, _ = quantize_tiles(
        tiling.cut(x), tiling, spec, amax=amax, seed=seed, stream=stream
    )
    return codes[:rows], scales, global_scale
