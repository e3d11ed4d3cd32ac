"""q2::masked_unrotate: the backward of quantize_masked, straight through the rounding.

    masked_unrotate(grad [M, Kp], mask uint8 [M, Kp/8], transform) -> [M, Kp]

The gradient of the rotated operand, zero where the rounding clipped, rotated back: T^-1(grad *
mask) along the last dimension. Kp is padded, as quantize_masked padded it: cut the result, not
grad, since a rotation back needs its whole chunks. fp32 inside, rounded once to grad's dtype.
"""

import torch

from q2compile.runtime_kernels.checks import check_operand
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.transforms import Transform, get_transform


def checked(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> Transform:
    """The transform by name.

    Raises:
        ValueError: grad is not a float matrix; mask is not uint8 in two dimensions; the transform
            is
            unknown or needs a seed, which this op does not take.
    """
    check_operand("masked_unrotate", grad)
    if mask.dtype != torch.uint8 or mask.dim() != 2:
        raise ValueError(
            "q2::masked_unrotate takes the packed mask of q2::quantize_masked, uint8 in two "
            f"dimensions, got {mask.dtype} in {mask.dim()}."
        )
    rotation = get_transform(transform)
    if rotation.seeded:
        raise ValueError(
            f"q2::masked_unrotate has no seed for the signs of {transform!r}: use the transform of "
            "quantize_masked, without signs or with fixed ones."
        )
    return rotation


def fake(grad, mask, transform):
    checked(grad, mask, transform)
    return grad.new_empty(grad.shape)


define("masked_unrotate(Tensor grad, Tensor mask, str transform) -> Tensor", fake=fake)
