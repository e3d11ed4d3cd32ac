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

import torch
from torch import Tensor

from q2compile.linear.autocast import cast
from q2compile.linear.autograd import LinearFunction
from q2compile.recipes.recipe import parse

_library = torch.library.Library("q2", "FRAGMENT")
_TEXTS = "str fprop, str dgrad, str wgrad, int seed_index, Tensor[]? codes=None"


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
    w = w.flatten(0, 1)
    return LinearFunction.apply(x, w, None, offs, recipe, seed_index, *(codes or ()))


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
