# SPDX-License-Identifier: Apache-2.0
"""q2::masked_unrotate: the backward of quantize with a mask, by the straight-through estimator.

    masked_unrotate(grad [M, Kp], mask uint8 [M, Kp/8], transform) -> [M, Kp]

grad is the gradient of the rotated operand. It is set to zero where the rounding clipped, and
rotated back: T^-1(grad * mask) along the last dimension. Kp is padded, as by q2::quantize: cut the
result, not grad, since the rotation needs whole chunks. fp32 inside, rounded once to grad's
dtype.
"""

from collections.abc import Sequence

import torch

from q2compile.runtime_kernels.numerics.layout import Tiling, unpack_bits
from q2compile.runtime_kernels.numerics.quantize_tiles import rotate_tiles_back
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.argument_checks import check_operand
from q2compile.runtime_kernels.registry import define


def checked_masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> Transform:
    """The transform by name, without a check of sizes.

    Raises:
        ValueError: grad is not a float matrix; the transform is unknown.
    """
    check_operand("masked_unrotate", grad)
    rotation = get_transform(transform)
    assert mask.dtype == torch.uint8 and mask.dim() == 2, "a packed mask is uint8 [M, Kp/8]"
    assert not rotation.seeded, f"q2::masked_unrotate has no seed for the signs of {transform}"
    return rotation


def fake(grad, mask, transform):
    checked_masked_unrotate(grad, mask, transform)
    return grad.new_empty(grad.shape)


def checked_shapes(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> Transform:
    """The transform by name."""
    rotation = checked_masked_unrotate(grad, mask, transform)
    check_shape(grad.shape, mask, rotation)
    return rotation


def check_shape(shape: Sequence[int], mask: torch.Tensor, rotation: Transform) -> None:
    """A gradient of this shape has the padded width of the mask, in whole chunks."""
    want = mask.shape[0], 8 * mask.shape[1]
    right = tuple(shape) == want and want[1] % rotation.size == 0
    assert right, f"q2::masked_unrotate of {list(shape)}, with a mask of {want}"


@define("masked_unrotate(Tensor grad, Tensor mask, str transform) -> Tensor", fake=fake)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> torch.Tensor:
    """The reference: see the top of this file."""
    rotation = checked_shapes(grad, mask, transform)
    masked = torch.where(unpack_bits(mask), grad.to(torch.float32), 0.0)
    tiling = Tiling.of(masked, rotation.size, transpose=False)
    return tiling.join(rotate_tiles_back(tiling.cut(masked), rotation, None)).to(grad.dtype)
