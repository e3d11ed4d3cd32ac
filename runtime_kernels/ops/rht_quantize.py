"""q2::rht_quantize: rotates the contraction of a matrix, then quantises it along that dimension.

    rht_quantize(x, seed?, scheme, transform, transpose, stream) -> codes uint8 [M, Kp/2], scales,
    global_scale fp32 0-dim

x is [M, K], or [K, M] with transpose: the contraction is K either way, padded with zeros to whole
chunks of the rotation. A scheme with an exact global scale takes it from the rotated tensor, inside
the op.
"""

import torch

from q2compile.runtime_kernels.checks import check_operand, check_seed
from q2compile.runtime_kernels.layout import empty_quantized
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.transforms import Transform, get_transform


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
