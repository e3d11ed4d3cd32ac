"""q2::amax(x): the largest magnitude of a tensor.

The one op that is meant to decompose: as plain aten it fuses into whatever produces x, a norm or an
activation, and costs no pass of its own.
"""

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from q2compile.runtime_kernels.registry import LIBRARY


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as an fp32 scalar. NaN and Inf come through; an empty tensor gives 0.

    Args:
        x: any shape, any float dtype.
    """
    if guard_or_false(x.numel() == 0):
        return x.new_zeros((), dtype=torch.float32)
    return x.abs().amax().to(torch.float32)


LIBRARY.define("amax(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("amax", amax, "CompositeImplicitAutograd")
