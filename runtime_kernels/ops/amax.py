# SPDX-License-Identifier: Apache-2.0
"""q2::amax(x): the largest magnitude of a tensor.

One node of a graph. Inductor lowers it as aten's ops (lowering/inductor_kernels/amax.py), so it
fuses into the kernel that produces x, a norm or an activation, and costs no extra read.
"""

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from q2compile.runtime_kernels.registry import define


@define("amax(Tensor x) -> Tensor", fake=lambda x: x.new_empty((), dtype=torch.float32))
def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| over the finite elements, an fp32 scalar; 0 if there are none. The global scale of a
    quantized operand is computed from it (numerics/blocks.py).

    Args:
        x: any shape, any float dtype.
    """
    if guard_or_false(x.numel() == 0):
        return x.new_zeros((), dtype=torch.float32)
    magnitude = x.abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).amax().to(torch.float32)
