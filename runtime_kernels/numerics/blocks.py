"""Blocks of one operand, as the rounding rules of nvfp4.py and mxfp4.py see them.

Tiles are [n, w, lanes], a block in each column of w = 16 or 32 (layout.py). The rules are the law
for every other kernel: each step is one fp32 operation with its own rounding, no fused
multiply-add, no re-association; a sum adds neighbours first: (t0+t1), (t2+t3), ...; then pairs of
those; and so on; or what it adds has so few bits that its order does not matter (nvfp4.py).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.numerics import philox
from q2compile.runtime_kernels.numerics.formats import round_e2m1, stochastic_round
from q2compile.runtime_kernels.numerics.layout import Tiling
from q2compile.runtime_kernels.numerics.schemes import Scheme

_HUGE = torch.finfo(torch.float32).max


class Rounded(NamedTuple):
    """What a rounding rule returns."""

    values: torch.Tensor  # fp32 tiles [n, w, lanes] of e2m1 values
    scales: torch.Tensor  # e4m3 or e8m0, one a block, laid out along rows
    global_scale: torch.Tensor  # fp32, 0-dim
    trusted: torch.Tensor | None = None  # bool tiles [n, w, lanes]: QuEST's trust mask


@dataclass(frozen=True)
class Blocks:
    """x: fp32 tiles [n, w, lanes]; tiling: how they were cut; factor: what MS-EDEN has still to
    multiply them by (the others find it done); seed, stream: of the coins; shares: of MS-EDEN with
    copies of rows (groups.py), fp32 [n / 8], one for the blocks of a chunk."""

    x: torch.Tensor
    tiling: Tiling
    scheme: Scheme
    factor: float | torch.Tensor
    seed: torch.Tensor | None
    stream: int
    shares: torch.Tensor | None = None

    def largest(self) -> torch.Tensor:
        """max |x| of each block, [n, 1, lanes]."""
        return self.shared(self.x.abs().amax(1, keepdim=True))

    def to_e2m1(self, scaled: torch.Tensor, purpose: int = philox.COINS) -> torch.Tensor:
        """Tiles divided by their scale -> e2m1 values, saturating, by the scheme's rounding."""
        if self.scheme.rounding != "sr":
            return round_e2m1(scaled)
        rows, columns = self.tiling.rows, self.tiling.pieces * self.tiling.size
        coins = self.coins((rows, columns), purpose)
        tiles = self.tiling.cut(coins.t() if self.tiling.transpose else coins, coins.dtype)
        return stochastic_round(scaled, tiles.view(scaled.shape), 1, 0).clamp_(-6.0, 6.0)

    def coins(self, shape: tuple[int, ...], purpose: int = philox.COINS) -> torch.Tensor:
        """32 random bits for each element of a row-major matrix, as int64: coin i for element i."""
        assert self.seed is not None, "the op checks that a stochastic scheme has a seed"
        words = philox.words(self.seed, math.prod(shape), stream=self.stream, purpose=purpose)
        return words.view(shape)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[n, m, lanes], m values a block -> [rows, m * blocks of a row]."""
        m = values.shape[1] * (self.tiling.size // self.scheme.width)
        outer = self.tiling.pieces if self.tiling.transpose else 1
        return self.tiling.join(values.reshape(outer, m, self.x.shape[2]))

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """[n, 1, lanes] -> [rows / rows of a block, blocks of a row]."""
        return self.join(scales)[:: self.scheme.block[0]].contiguous()

    def shared(self, per_row: torch.Tensor, *, total: bool = False) -> torch.Tensor:
        """For blocks of several rows: a value of each row's part of a block, [n, 1, lanes] -> the
        maximum (or sum) of the rows of the block, at every one of them."""
        height = self.scheme.block[0]
        if height == 1:
            return per_row
        rows = per_row.view(self.tiling.rows // height, height, self.tiling.pieces)
        merged = sum_neighbours(rows) if total else rows.amax(1, keepdim=True)
        return merged.expand(rows.shape).reshape(per_row.shape)


def sum_neighbours(tiles: torch.Tensor) -> torch.Tensor:
    """Sum over the middle dimension (a power of two), neighbours first: [n, w, l] -> [n, 1, l]."""
    while tiles.shape[1] > 1:
        tiles = tiles[:, 0::2] + tiles[:, 1::2]
    return tiles


def or_one(x: torch.Tensor) -> torch.Tensor:
    """x with its zeros replaced by one: what may be divided by."""
    return torch.where(x == 0, 1.0, x)


def finite_reciprocal(numerator: torch.Tensor | float, scale: torch.Tensor) -> torch.Tensor:
    """numerator / scale, numerator where the scale is 0, and the largest fp32 where it overflows
    (scales under 2^-128): an Inf would turn the zeros of x into NaN."""
    return (numerator / or_one(scale)).clamp_(max=_HUGE)


def finite_or_nan(global_scale: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Poison: NaN or Inf anywhere in the input makes every dequantised value NaN, so that a loss
    scaler sees it."""
    return torch.where(largest_of(magnitudes).isfinite(), global_scale, torch.nan)


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """max(x), 0 for an empty tensor. NaN comes through."""
    return x.amax() if x.numel() else x.new_zeros(())
