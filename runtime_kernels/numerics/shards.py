# SPDX-License-Identifier: Apache-2.0
"""The codes of a shard, as they are among the codes of the whole weight.

A weight w [N, K], or a stack of experts [E, N, K] that is quantized as [E * N, K], is sharded
along one dimension, and shards hold whole blocks (`why_not`). So a block's codes depend on nothing
outside of its shard, but for the global scale g:

    pow2    codes and raw scales p are the block's own; g = 2^k is found from the largest p of the
            whole weight, and a block scale is e4m3(p / g)
    exact   g = amax / (vmax * cap), by the amax of the whole weight; codes and scales depend on it
    fp8     g = 2^k, by the amax of the whole weight; codes depend on it
    none    MXFP4: g is a constant

So ranks have to agree on one number, by a maximum (`agreement`), and each then quantizes its shard
under the g of the whole weight. No value is quantized twice: what is gathered are the bits that a
quantizer of the whole weight writes. In particular, block scales are not made under the shard's own
g and changed afterwards: in e4m3's subnormals that would round them twice.

A quantizer takes no g. It finds one, and finds the wanted one in rows that are added to the shard
(`filled`) and cut off its codes:

    pow2    all elements are 1536 * g. A block of equal elements has an error of 0 under the first
            candidate scale, p = 1536 * g / 6 = 256 * g, in every scheme. The smallest 2^k with
            256 * g / 2^k <= 448 is g, since 256 / 448 > 1/2; and no p of the shard is over 448 * g.
    exact, fp8    one element is the amax.

Under pow2 a weight with an element beyond 2^125 may get g = NaN on all ranks, because 1536 * g has
to be finite, where the whole weight's quantizer still has a number.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform

LARGEST_G = 2.0**117  # the rows that set g hold 1536 * g < 2^128
NAN_SCALE = 0x7F  # the bits of an e4m3 scale


@dataclass(frozen=True)
class ShardLayout:
    """How a weight is cut: sizes [E, N, K] of all of it and of one shard, with its padding, as the
    quantizer sees them; E is 1 for a matrix. dim: along which of the three."""

    whole: tuple[int, int, int]
    shard: tuple[int, int, int]
    dim: int

    @classmethod
    def of(
        cls, whole: Sequence[int], shard: Sequence[int], dim: int, transposed: bool = False
    ) -> ShardLayout:
        """whole, shard: sizes of the parameter, of two or three dimensions. transposed: its last
        two dimensions are K and N."""
        dim += 3 - len(whole)
        if transposed and dim > 0:
            dim = 3 - dim
        return cls(_sizes(whole, transposed), _sizes(shard, transposed), dim)

    @property
    def rows(self) -> int:
        """The rows of a shard as a matrix."""
        return self.shard[0] * self.shard[1]

    def joined(self, gathered: Tensor, height: int) -> Tensor:
        """[ranks * rows / height, n], all shards' codes, or scales with one row for ``height`` of
        the weight's, as those of the whole weight."""
        ranks = gathered.shape[0] * height // self.rows
        if self.dim == 1 and self.shard[0] > 1:
            apart = gathered.view(ranks, self.shard[0], -1, gathered.shape[1])
            gathered = apart.transpose(0, 1).flatten(0, 2)
        elif self.dim == 2:
            columns = gathered.shape[1] * self.whole[2] // self.shard[2]
            gathered = gathered.view(ranks, -1, gathered.shape[1]).transpose(0, 1).flatten(1)
            gathered = gathered[:, :columns].contiguous()
        return gathered[: -(-self.whole[0] * self.whole[1] // height)]


def _sizes(shape: Sequence[int], transposed: bool) -> tuple[int, int, int]:
    *experts, n, k = (1, *shape) if len(shape) == 2 else shape
    return (experts[0], k, n) if transposed else (experts[0], n, k)


def why_not(
    scheme: Scheme, transform: Transform, dtypes: Collection[torch.dtype], layout: ShardLayout
) -> str:
    """Why the codes of shards are not those of the whole weight; "" if they are. dtypes: that the
    weight is in, and that it is cast to."""
    height, unit = scheme.block[0], max(scheme.width, transform.size)
    rows = layout.shard[1] if layout.dim == 1 else layout.rows  # that follow each other in it
    own, columns = layout.shard[2], layout.whole[2]
    if rows % height:
        return f"a rank has {rows} of its rows, and a block spans {height}"
    if layout.dim == 2 and (own % unit or columns % unit):
        return f"a rank has {own} of its {columns} columns, and a block spans {unit}"
    if scheme.global_scale != "none" and transform.size > 1:
        return f"its global scale is found after the rotation {transform.name}"
    if scheme.global_scale != "none" and torch.float16 in dtypes:
        return "it is fp16, in which a row that sets the global scale may overflow"
    return ""


def found_in(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One rank's part of `agreement`, for a pow2 scheme: g, and whether any block has a scale."""
    return parts[2], (parts[1].view(torch.uint8) % NAN_SCALE).bool().any()


def agreement(found: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The int32 [weights] of which all ranks take the maximum: the bits of an fp32 >= 0, which are
    ordered as the fp32 values, NaN last. Batched over weights, since each call costs the host more
    than the GPU.

    found: of `found_in`; for a scheme that takes the amax, that of the shard and None."""
    values = torch.stack([value for value, _ in found])
    some = torch.stack([value.isfinite() if some is None else some for value, some in found])
    silent = ~some & values.isfinite()  # of zeros g is 1, which says nothing
    return values.view(torch.int32).masked_fill(silent, 0)


def global_scale(agreed: Tensor) -> Tensor:
    """g of pow2 schemes by the maximum of the ranks: fp32 [weights]."""
    g = agreed.view(torch.float32)
    return g.masked_fill(g == 0, 1.0).masked_fill(g > LARGEST_G, torch.nan)


def filled(shard: Tensor, scheme: Scheme, agreed: Tensor, g: Tensor) -> Tensor:
    """The matrix to quantize: a shard, and rows in which a quantizer finds the global scale of the
    whole weight. agreed, g: its maximum and its `global_scale`, 0-dim."""
    value = agreed.view(torch.float32) if scheme.takes_amax else 1536.0 * g
    rows = value.to(shard.dtype).expand(scheme.block[0], shard.shape[1])
    if scheme.takes_amax:
        rows = torch.nn.functional.pad(rows[:, :1], (0, shard.shape[1] - 1))
    return torch.cat([shard, rows])


def sent_parts(scheme: Scheme) -> int:
    """The length of `of_shard`."""
    return 1 + scheme.has_block_scales + scheme.masked


def of_shard(parts: Sequence[Tensor], count: int, scheme: Scheme) -> list[Tensor]:
    """Bytes of the first ``count`` rows: codes, block scales if there are any, QuEST's mask."""
    codes, scales, _, *mask = parts
    own = [codes[:count], *(m[:count] for m in mask)]
    if scheme.has_block_scales:
        own.insert(1, scales[: count // scheme.block[0]])
    return [t.view(torch.uint8) for t in own]


def of_whole(received: Sequence[Tensor], layout: ShardLayout, scheme: Scheme) -> list[Tensor]:
    """The results of `of_shard` of all shards, as codes, scales (and mask) of the whole weight."""
    dtype = torch.float8_e8m0fnu if scheme.format == "mxfp4" else torch.float8_e4m3fn
    if not scheme.has_block_scales:
        (codes,) = received
        none = codes.new_empty((0, 0)).view(dtype)
        return [layout.joined(codes, 1).view(scheme.codes_dtype), none]
    codes, scales, *mask = received
    scales = layout.joined(scales, scheme.block[0]).view(dtype)
    return [layout.joined(codes, 1), scales, *(layout.joined(m, 1) for m in mask)]
