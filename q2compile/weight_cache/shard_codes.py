"""The codes of a shard, as they are among the codes of the whole weight.

A weight w [N, K] is sharded along its rows. Blocks lie along K, and a 16x16 block within 16 rows,
so a block is in one shard and its codes depend on nothing else, but for the global scale g:

    pow2    codes and raw scales p are the block's own; g = 2^k is found from the largest p of the
            whole weight, and a block scale is e4m3(p / g)
    exact   g = amax / (vmax * cap), by the amax of the whole weight; codes and scales depend on it
    none    MXFP4: g is a constant

So ranks have to agree on one number, by a maximum (`agreement`), and each then quantizes its shard
under the g of the whole weight. No value is quantized twice: what is gathered are the bits that a
quantizer of the whole weight writes. In particular, block scales are not made under the shard's own
g and changed afterwards: in e4m3's subnormals that would round them twice.

A quantizer takes no g. It finds one, and finds the wanted one in rows that are added to the shard
(`fill`) and cut off its codes:

    pow2    all elements are 1536 * g. A block of equal elements has an error of 0 under the first
            candidate scale, p = 1536 * g / 6 = 256 * g, in every scheme. The smallest 2^k with
            256 * g / 2^k <= 448 is g, since 256 / 448 > 1/2; and no p of the shard is over 448 * g.
    exact   one element is the amax.

Under pow2 a weight with an element beyond 2^125 may get g = NaN on all ranks, because 1536 * g has
to be finite, where the whole weight's quantizer still has a number.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme

_NAN = 0x7F  # as an e4m3 scale
_LARGEST_G = 2.0**117  # 1536 * g < 2^128


def scheme_of(operand: str) -> Scheme:
    return SCHEMES[Operand.parse(operand).scheme]


def why_not(operand: str, dtypes: Collection[torch.dtype], rows: int) -> str:
    """Why codes by ``operand`` of shards of so many rows can't be those of the whole weight.
    dtypes: that the weight is in, and that it is cast to."""
    scheme, transform = scheme_of(operand), Operand.parse(operand).transform
    if rows % scheme.block[0]:
        return f"a rank has {rows} of its rows, and a block spans {scheme.block[0]}"
    if scheme.global_scale != "none" and transform != "none":
        return f"its global scale is found after the rotation {transform}"
    if scheme.global_scale != "none" and torch.float16 in dtypes:
        return "it is fp16, in which a row that sets the global scale may overflow"
    return ""


def with_rows(shard: Tensor, operand: str, dtype: torch.dtype) -> Tensor:
    """A copy of shard [R, K] in ``dtype``, with zeros in the rows that `fill` fills: what is
    quantized."""
    rows = shard.shape[0] + more_rows(operand)
    copy = shard.new_zeros((rows, shard.shape[1]), dtype=dtype)
    copy[: shard.shape[0]].copy_(shard)
    return copy


def more_rows(operand: str) -> int:
    scheme = scheme_of(operand)
    return 0 if scheme.global_scale == "none" else scheme.block[0]


def agreement(parts: Sequence[Tensor] | None, rows: Tensor, operand: str) -> Tensor:
    """The number of which all ranks take the maximum, int32 0-dim: the bits of an fp32 >= 0, which
    are ordered as it is, NaN last. parts: of `with_rows` quantized, for a pow2 scheme."""
    scheme = scheme_of(operand)
    if scheme.global_scale == "exact":
        return torch.ops.q2.amax(rows).view(torch.int32)
    assert parts is not None
    scales, g = parts[1].view(torch.uint8), parts[2]
    none = ((scales == 0) | (scales == _NAN)).all() & g.isfinite()
    return g.view(torch.int32).masked_fill(none, 0)  # of zeros g is 1, which says nothing


def global_scale(agreed: Tensor) -> Tensor:
    """g of a pow2 scheme by the maximum of the ranks: fp32 0-dim."""
    g = agreed.view(torch.float32)
    return torch.where(g == 0, 1.0, g).masked_fill(g > _LARGEST_G, torch.nan)


def fill(rows: Tensor, count: int, operand: str, agreed: Tensor) -> None:
    """Set the rows after the first ``count``."""
    if scheme_of(operand).global_scale == "exact":
        rows[count:, :1].copy_(agreed.view(torch.float32).expand(rows.shape[0] - count, 1))
    else:
        rows[count:].copy_((1536.0 * global_scale(agreed)).expand_as(rows[count:]))


def of_shard(parts: Sequence[Tensor], count: int, operand: str) -> list[Tensor]:
    """Bytes of the first ``count`` rows: codes, block scales, QuEST's mask."""
    codes, scales, _, *mask = parts
    height = scheme_of(operand).block[0]
    own = [codes[:count], scales[: count // height], *(m[:count] for m in mask)]
    return [t.view(torch.uint8) for t in own]


def of_whole(received: Sequence[Tensor], rows: int, operand: str) -> list[Tensor]:
    """What `of_shard` makes of all shards, as the codes, scales (and mask) of a weight of so many
    rows."""
    scheme = scheme_of(operand)
    dtype = torch.float8_e4m3fn if scheme.format == "nvfp4" else torch.float8_e8m0fnu
    codes, scales, *mask = received
    scale_rows = -(-rows // scheme.block[0])
    return [codes[:rows], scales[:scale_rows].view(dtype), *(m[:rows] for m in mask)]
