"""q2::rht_quantize: rotates the contraction of a matrix, then quantises it along that dimension.

    rht_quantize(x, seed?, scheme, transform, transpose, stream) -> codes uint8 [M, Kp/2], scales,
    global_scale fp32 0-dim

x is [M, K], or [K, M] with transpose: the contraction is K either way, padded with zeros to whole
chunks of the rotation. A scheme with an exact global scale takes it from the rotated tensor, inside
the op.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import Tiling, empty_quantized
from q2compile.runtime_kernels.numerics.quantize_tiles import (
    Quantized,
    quantize_tiles,
    rotate_tiles,
)
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.argument_checks import check_operand, check_seed
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def checked(
    op: str, seed: torch.Tensor | None, scheme: str, transform: str
) -> tuple[Scheme, Transform]:
    """The scheme and the transform by name.

    Raises:
        ValueError: one is unknown; a seed is missing; the scheme's blocks span rows, which a
            rotation would make pointless.
    """
    spec, rotation = get_scheme(scheme), get_transform(transform)
    if spec.block[0] != 1:
        raise ValueError(
            f"q2::{op} takes schemes with one row a block, got {scheme}: blocks of "
            f"{spec.block[0]}x{spec.block[1]} exist to be reused transposed, which a rotation "
            "along one dimension rules out."
        )
    check_seed(op, seed, spec, rotation)
    return spec, rotation


def fake(x, seed, scheme, transform, transpose, stream):
    spec, rotation = checked("rht_quantize", seed, scheme, transform)
    check_operand("rht_quantize", x)
    rows, contraction = (x.shape[1], x.shape[0]) if transpose else x.shape
    return empty_quantized(x, rows, contraction, spec, rotation)


define(
    "rht_quantize(Tensor x, Tensor? seed, str scheme, str transform, bool transpose, int stream)"
    " -> (Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("rht_quantize", REFERENCE)
def rht_quantize(
    x: torch.Tensor,
    seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    transpose: bool,
    stream: int,
) -> Quantized:
    """The reference: see the top of this file."""
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
    shares: torch.Tensor | None = None,
) -> Quantized:
    """The same for x * factor, which may be applied late (quantize_tiles.py has shares, too)."""
    tiling = Tiling.of(x, max(spec.width, rotation.size), transpose=transpose)
    tiles = rotate_tiles(tiling.cut(x), rotation, seed)
    codes, scales, global_scale, _ = quantize_tiles(
        tiles,
        tiling,
        spec,
        factor=factor * rotation.norm,
        seed=seed,
        stream=stream,
        shares=shares,
    )
    return codes, scales, global_scale
