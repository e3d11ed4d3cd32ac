# SPDX-License-Identifier: Apache-2.0
"""Linear layers with one weight per group of rows: the experts of a mixture.

Three ops, CompositeImplicitAutograd like `q2::linear`, and one autograd.Function behind them. E
weights w [E, N, K]; T rows of x in all, of which each is multiplied with one weight:

    grouped_linear(x [T, K], w, offs [E])     rows sorted by expert, offs are the ends of the groups
    batched_linear(x [E, ..., K], w)          groups of equal size
    indexed_linear(x [..., K], w, index [...])    each row names its expert

Along K, quantizing is independent of the grouping of rows. So x and w [E * N, K] are quantized as
any matrix, and so is dy along N. In the backward, contractions must not mix experts:

- Along T (wgrad) q2::quantize and q2::requantize quantize groups separately, in whole chunks of 128
  rows per expert. MS-EDEN is unbiased for few tokens, too (numerics/groups.py).
- The N rows of w (dgrad) are padded to whole chunks.

Empty groups are allowed.

The weights of all experts share a global scale, as do the operands of their gradients. The global
scale places block scales within e4m3, which spans 2^17. Experts lose accuracy only if they differ
by more than that, and every kernel for a single matrix takes one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from q2compile.linear.autocast import cast
from q2compile.linear.autograd import (
    InGroups,
    Saved,
    SavedCodes,
    backward,
    dequantized,
    forward,
)
from q2compile.recipes.recipe import Gemm, Operand, Recipe, parse
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS

_library = torch.library.Library("q2", "FRAGMENT")
_AMAX_OF_SCALE = 225.0  # fp8 takes the global scale 1 for an amax above 224 and up to 448
_TEXTS = "str fprop, str dgrad, str wgrad, int seed_index, Tensor[]? codes=None"


class Grouped(InGroups):
    """x's rows up to offs[0] with the first of the weights, those up to offs[1] with the next.

    The weights are one matrix [E * N, K], and so are their gradients."""

    def __init__(self, offs: Tensor, padded_offs: Tensor) -> None:
        super().__init__(offs, padded_offs)
        self.experts = offs.shape[0]

    def columnwise(
        self, gemm_name: str, x: Tensor, operand: Operand, seed: Tensor | None, rng_offset: int
    ) -> Sequence[Tensor]:
        x = self._padded(x, operand) if gemm_name == "dgrad" else x
        return super().columnwise(gemm_name, x, operand, seed, rng_offset)

    def requantized(
        self, gemm_name: str, saved: SavedCodes, operand: Operand, seed: Tensor | None
    ) -> Sequence[Tensor]:
        if gemm_name == "dgrad":
            codes, scales, global_scale = saved.codes
            padded = self._padded(codes, operand), self._padded(scales, operand), global_scale
            saved = saved._replace(codes=padded)
        return super().requantized(gemm_name, saved, operand, seed)

    def transposed(self, gemm_name: str, saved: SavedCodes) -> Sequence[Tensor]:
        if gemm_name == "dgrad":
            return super().transposed(gemm_name, saved)
        # Groups apart: quantized again, from an amax for which the global scale stays what it is.
        # So do the codes, and the partitioner has no other output to save from the forward.
        _, *scales = saved.codes
        codes, *_ = torch.ops.q2.quantize(
            dequantized(saved),
            scheme=saved.scheme,
            transform="none",
            rowwise=False,
            columnwise=True,
            amax=scales[-1] * _AMAX_OF_SCALE,
            rng_offset=1,
            **self.ends,
        )
        return codes, *scales

    def _padded(self, w: Tensor, operand: Operand) -> Tensor:
        """The saved parts of w, its N rows per expert padded to whole blocks and chunks."""
        unit = max(SCHEMES[operand.scheme].width, TRANSFORMS[operand.transform].size)
        n = w.shape[0] // self.experts
        wide = -(-n // unit) * unit
        if n == wide:
            return w
        stored = w.view(torch.uint8) if w.element_size() == 1 else w  # few functions take fp8
        apart = torch.nn.functional.pad(stored.unflatten(0, (self.experts, n)), (0, 0, 0, wide - n))
        return apart.flatten(0, 1).view(w.dtype)

    def gemm(
        self,
        gemm_name: str,
        gemm: Gemm,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        bias: Tensor | None,
        dtype: Any,
    ) -> Tensor:
        offs = self.padded_offs if gemm_name == "wgrad" else self.offs
        return torch.ops.q2.grouped_gemm(
            *a, *b, offs, gemm.a.scheme, gemm.b.scheme, gemm_name, dtype
        )

    def plain(self, gemm_name: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if gemm_name == "wgrad":
            return torch.ops.q2.grouped_mm(a.t(), b, self.offs).flatten(0, 1)
        w = b.unflatten(0, (self.experts, -1))
        return torch.ops.q2.grouped_mm(a, w.mT if gemm_name == "fprop" else w, self.offs)


class GroupedLinearFunction(torch.autograd.Function):
    """x [T, K], w [E * N, K], one floating dtype, offs int32 [E] -> y [T, N] of that dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        offs: Tensor,
        recipe: Recipe,
        seed_index: int,
        *w_parts: Tensor,
    ) -> Tensor:
        # FP8's wgrad has no empty group: grouped products on FP8 tensor cores contract none.
        filled = recipe.wgrad is not None and SCHEMES[recipe.wgrad.a.scheme].is_tensorwise
        padded_offs = torch.ops.q2.padded_ends(offs, filled)
        y, saved = forward(ctx, Grouped(offs, padded_offs), x, w, None, recipe, seed_index, w_parts)
        ctx.save_for_backward(offs, padded_offs, *saved.values())
        ctx.names = tuple(saved)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offs, padded_offs, *tensors = ctx.saved_tensors
        saved = Saved(zip(ctx.names, tensors, strict=True))
        dx, dw = backward(ctx, Grouped(offs, padded_offs), dy, saved)
        return dx, dw, *(None for _ in ctx.needs_input_grad[2:])


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    seed_index: int,
    codes: Sequence[Tensor] | None = None,
) -> Tensor:
    """y [T, N]: the rows of x [T, K] of group e times w[e] of w [E, N, K].

    offs [E] are the ends of the groups, ascending integers. Rows of no group, from offs[E - 1] on,
    give zero, and get a gradient of zero. The other arguments are q2::linear's; codes are those of
    w [E * N, K]. Autocast casts nothing, as it casts nothing for torch._grouped_mm.
    """
    recipe, offs = parse(fprop, dgrad, wgrad), offs.to(torch.int32)
    return GroupedLinearFunction.apply(x, w.flatten(0, 1), offs, recipe, seed_index, *(codes or ()))


def batched_linear(
    x: Tensor,
    w: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    seed_index: int,
    codes: Sequence[Tensor] | None = None,
) -> Tensor:
    """y [E, ..., N]: x[e] [..., K] times w[e] [N, K]. Under autocast cast as bmm's operands are."""
    x, w = cast(x, w)
    rows = x.reshape(w.shape[0], -1, w.shape[2])
    ends = torch.arange(1, w.shape[0] + 1, dtype=torch.int32, device=x.device) * rows.shape[1]
    y = grouped_linear(rows.flatten(0, 1), w, ends, fprop, dgrad, wgrad, seed_index, codes)
    return y.view(*x.shape[:-1], w.shape[1])


def indexed_linear(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    fprop: str,
    dgrad: str,
    wgrad: str,
    seed_index: int,
    codes: Sequence[Tensor] | None = None,
) -> Tensor:
    """y [..., N]: the row t of x [..., K] times w[index[t]].

    Weights are not gathered, as by a bmm with w[index]; the rows of x are sorted instead. So the
    tokens of an expert are quantized as one group for wgrad, and each weight once. index [...] is
    integer; as in torch's indexing -1 is the last expert. Under autocast, operands are cast as
    bmm's are."""
    x, w = cast(x, w)
    experts, places = w.shape[0], index.shape
    x, index = x.flatten(0, -2), index.flatten()
    ordered, order = torch.where(index < 0, index + experts, index).sort(stable=True)
    ends = torch.searchsorted(
        ordered, torch.arange(experts, dtype=index.dtype, device=x.device), right=True
    )
    y = grouped_linear(x[order], w, ends, fprop, dgrad, wgrad, seed_index, codes)
    return y[order.argsort()].view(*places, w.shape[1])


for _schema, _function in {
    f"grouped_linear(Tensor x, Tensor w, Tensor offs, {_TEXTS}) -> Tensor": grouped_linear,
    f"batched_linear(Tensor x, Tensor w, {_TEXTS}) -> Tensor": batched_linear,
    f"indexed_linear(Tensor x, Tensor w, Tensor index, {_TEXTS}) -> Tensor": indexed_linear,
}.items():
    _library.define(_schema)
    _library.impl(_function.__name__, _function, "CompositeImplicitAutograd")
