# SPDX-License-Identifier: Apache-2.0
"""q2::gemm_masked_unrotate: q2::gemm, then q2::masked_unrotate of its result.

    gemm_masked_unrotate(a_codes [M, Kp/2], a_scales, a_global, b_codes [Np, Kp/2], b_scales,
    b_global?, mask uint8 [M, Np/8], a_scheme, b_scheme, transform, dtype) -> [M, Np]

masked_unrotate(gemm(...), mask, transform), with the bits of the two ops: the product is rounded to
dtype before it is masked, as if it went through memory.

The reference calls the two ops, each of which runs by its own best kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.ops import gemm as product
from q2compile.runtime_kernels.ops import masked_unrotate as rotation
from q2compile.runtime_kernels.registry import define


def _gemm_args(args: Sequence) -> tuple:
    """The arguments of q2::gemm, from this op's."""
    *operands, _, a_scheme, b_scheme, _, dtype = args
    return (*operands, None, a_scheme, b_scheme, dtype)


def fake(*args):
    grad = product.fake(*_gemm_args(args))
    rotation.checked_masked_unrotate(grad, args[6], args[9])
    return grad


@define(
    "gemm_masked_unrotate(Tensor a_codes, Tensor a_scales, Tensor a_global,"
    " Tensor b_codes, Tensor b_scales, Tensor? b_global, Tensor mask,"
    " str a_scheme, str b_scheme, str transform, ScalarType dtype) -> Tensor",
    fake=fake,
)
def gemm_masked_unrotate(*args: Any) -> torch.Tensor:
    """The reference: see the top of this file."""
    return torch.ops.q2.masked_unrotate(torch.ops.q2.gemm(*_gemm_args(args)), args[6], args[9])
