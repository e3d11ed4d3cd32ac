# SPDX-License-Identifier: Apache-2.0
"""The ops q2::linear and q2::quantize_weight.

They are CompositeImplicitAutograd: AOTAutograd traces through them into an autograd.Function made
of the functional ops of `q2compile.runtime_kernels`, so forward and backward graphs stay readable
and torch's caches apply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import q2compile.runtime_kernels  # noqa: F401  registers the ops used here
from q2compile.linear import tensor_parallel
from q2compile.linear.autocast import cast, without_autocast
from q2compile.linear.autograd import LinearFunction, forward_parts
from q2compile.recipes.recipe import Operand, parse
from q2compile.torch_internals.jagged import jagged_like

_library = torch.library.Library("q2", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, str fprop, str dgrad, str wgrad, int seed_index,"
    " Tensor[]? codes=None) -> Tensor"
)
_library.define(
    "quantize_weight(Tensor w, str operand, ScalarType dtype, bool both=False) -> Tensor[]"
)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    fprop: str,
    dgrad: str,
    wgrad: str,
    seed_index: int,
    codes: Sequence[Tensor] | None = None,
) -> Tensor:
    """y [..., N] = x [..., K] wᵀ + bias, each GEMM as its text says (`recipes.Gemm`).

    x may be a jagged nested tensor [B, j, ..., K]. Under autocast x and w are cast first, as
    torch's own linear would. ``seed_index`` tells the sites of one graph apart, so that two equal
    layers with the same gradient do not draw the same random bits. ``codes``: what
    `quantize_weight` makes of w, of this rank's part where w is a DTensor; None to make it here.
    """
    x, w, bias = cast(x, w, bias)
    recipe = parse(fprop, dgrad, wgrad)

    def local_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = LinearFunction.apply(flat, w, bias, None, recipe, seed_index, *(codes or ()))
        return y.reshape(*x.shape[:-1], w.shape[0])

    with without_autocast(x.device.type):
        if x.is_nested:  # the values of a jagged tensor are its rows
            return jagged_like(x, local_linear(x.values(), w, bias))
        if isinstance(w, DTensor):
            return tensor_parallel.linear(x, w, bias, local_linear)
        return local_linear(x, w, bias)


def quantize_weight(
    w: Tensor, operand: str, dtype: torch.dtype, both: bool = False
) -> list[Tensor]:
    """fprop's quantization of w [N, K], first cast to ``dtype``: codes, scales, global scale, and
    the mask of a QuEST scheme. ``operand`` is its text (`recipes.Operand`). both: then the codes
    and scales transposed, for a dgrad that reuses them."""
    wanted = Operand.parse(operand)
    with without_autocast(w.device.type):
        parts = list(forward_parts(w.to(dtype), wanted))
        if both:
            parts += torch.ops.q2.transpose(*parts[:2], wanted.scheme, w.shape[1])
        return parts


_library.impl("linear", linear, "CompositeImplicitAutograd")
_library.impl("quantize_weight", quantize_weight, "CompositeImplicitAutograd")
