# SPDX-License-Identifier: Apache-2.0
"""q2::masked_unrotate in C++: csrc/dequantize.h."""

from __future__ import annotations

from ctypes import byref

import torch

from q2compile.runtime_kernels.cpu import kernels
from q2compile.runtime_kernels.ops.masked_unrotate import checked_shapes
from q2compile.runtime_kernels.ops.table import MASKED_UNROTATE


@kernels.cpu_kernel(MASKED_UNROTATE)
def masked_unrotate(grad: torch.Tensor, mask: torch.Tensor, transform: str) -> torch.Tensor:
    """See ops/masked_unrotate.py."""
    rotation = checked_shapes(grad, mask, transform)
    grad, mask = grad.contiguous(), mask.contiguous()
    out = torch.empty_like(grad)
    masked = kernels.Masked(
        *(grad.data_ptr(), mask.data_ptr(), out.data_ptr(), *grad.shape),
        *(kernels.TYPES[grad.dtype], rotation.size, rotation.signs != "none", rotation.norm),
        kernels.sign_seed(rotation, None),
    )
    kernels.entry("q2_masked_unrotate")(byref(masked))
    return out
