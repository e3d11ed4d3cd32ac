"""q2::masked_unrotate in torch."""

import torch

from q2compile.runtime_kernels.layout import Tiling, unpack_bits
from q2compile.runtime_kernels.masked_unrotate.op import checked
from q2compile.runtime_kernels.quantizer import rotate_tiles_back
from q2compile.runtime_kernels.registry import REFERENCE, kernel
from q2compile.runtime_kernels.transforms import Transform


def checked_shapes(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> Transform:
    """The transform by name.

    Raises:
        ValueError: as `checked`; and grad and mask do not have the same padded width, or it is not
            whole chunks.
    """
    rotation = checked(grad, mask, transform)
    width = 8 * mask.shape[1]
    if grad.shape != (mask.shape[0], width) or width % rotation.size:
        raise ValueError(
            f"q2::masked_unrotate: the mask is of a padded [{mask.shape[0]}, {width}] in chunks of "
            f"{rotation.size}, the gradient is {list(grad.shape)}: pass the padded gradient."
        )
    return rotation


@kernel("masked_unrotate", REFERENCE)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> torch.Tensor:
    """See masked_unrotate/op.py."""
    rotation = checked_shapes(grad, mask, transform)
    kept = torch.where(unpack_bits(mask), grad.to(torch.float32), 0.0)
    tiling = Tiling.of(kept, rotation.size, transpose=False)
    return tiling.join(rotate_tiles_back(tiling.cut(kept), rotation, None)).to(grad.dtype)
