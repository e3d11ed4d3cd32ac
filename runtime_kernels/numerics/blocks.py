# SPDX-License-Identifier: Apache-2.0
"""Blocks of one operand, as the rounding rules of nvfp4.py and mxfp4.py see them.

Tiles are [n, w, lanes], a block in each column of w = 16 or 32 (layout.py). The rules are the
reference semantics of all kernels. Each step is one fp32 operation with its own rounding: no fused
multiply-add, no re-association. A sum adds neighbors first: (t0+t1), (t2+t3), ...; then pairs of
those; and so on. Other sums are exact, so that their order does not matter (nvfp4.py).

Non-finite elements. A block that holds a NaN or an Inf is poisoned: its scale is NaN (0x7F in
e4m3, 0xFF in e8m0). So every element of it dequantizes to NaN, and every result that contracts it
is NaN. Its codes are unspecified. Nothing else changes:

- The other blocks have the bits that they have where the poisoned block holds zeros. The global
  scale is taken over the finite blocks (q2::amax: over the finite elements).
- A rotation mixes a chunk (transforms.py): all blocks of the chunk are poisoned then.
- A NaN scale in the source of a requantization is a NaN in each element of that block.
- QuEST trusts no element of a poisoned block. Sums of columns are plain sums.

Reasons:

- Rows of an operand are tokens, in inference of different requests. No token may depend on another
  one's fault. A matrix product is NaN in the rows that have a NaN, and in no other.
- Poison must not vanish: gradient scalers look for it in the gradients, and an Inf that saturates
  would be a plausible value.
- The scale holds it because e2m1 has no NaN. FP4 tensor cores and all emulations propagate it.
- Codes are unspecified because clearing them would cost an instruction for each element.

The global scale itself is NaN, and so are all scales, in three cases: an amax that is given is not
finite; the global scale of a source is not finite; fp32 cannot hold the largest raw scale times the
factor (|x| near 2^127).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.numerics import philox
from q2compile.runtime_kernels.numerics.formats import round_e2m1, stochastic_e2m1
from q2compile.runtime_kernels.numerics.layout import Tiling
from q2compile.runtime_kernels.numerics.schemes import Scheme

_HUGE = torch.finfo(torch.float32).max


class Rounded(NamedTuple):
    """The result of a rounding rule."""

    values: torch.Tensor  # fp32 tiles [n, w, lanes] of e2m1 values
    scales: torch.Tensor  # e4m3 or e8m0, one a block, laid out along rows
    global_scale: torch.Tensor  # fp32, 0-dim
    trusted: torch.Tensor | None = None  # bool tiles [n, w, lanes]: QuEST's trust mask


@dataclass(frozen=True)
class Blocks:
    """The blocks of a matrix.

    x: fp32 tiles [n, w, lanes].
    tiling: how they were cut.
    factor: of x, not yet applied (quantize_tiles.py).
    seed, rng_offset: of the random bits.
    shares: fp32 [n / 8], one for each chunk: of MS-EDEN with copies of rows (groups.py).
    """

    x: torch.Tensor
    tiling: Tiling
    scheme: Scheme
    factor: float | torch.Tensor
    seed: torch.Tensor | None
    rng_offset: int
    shares: torch.Tensor | None = None

    @cached_property
    def largest(self) -> torch.Tensor:
        """max |x * factor| of each block (MS-EDEN: max |x|), [n, 1, lanes]; 0 for a poisoned block,
        which counts as zeros."""
        return torch.where(self.poisoned, 0.0, self._largest)

    @cached_property
    def poisoned(self) -> torch.Tensor:
        """The blocks that are not finite: bool [n, 1, lanes]."""
        return ~self._largest.isfinite()

    @cached_property
    def _largest(self) -> torch.Tensor:
        largest = self.shared(self.x.abs().amax(1, keepdim=True))
        return largest if self.scheme.rounding == "ms_eden" else largest * self.factor

    def scaled(self, reciprocal: torch.Tensor) -> torch.Tensor:
        """x * factor * reciprocal, the reciprocal being that of the blocks' scales: one product for
        each element. In a block of zeros reciprocal * factor may overflow."""
        return self.x * (reciprocal * self.factor).clamp_(max=_HUGE)

    def to_e2m1(self, scaled: torch.Tensor, purpose: int = philox.RANDOM_BITS) -> torch.Tensor:
        """Tiles divided by their scale -> e2m1 values, saturating, by the scheme's rounding."""
        if self.scheme.rounding != "sr":
            return round_e2m1(scaled)
        rows, columns = self.tiling.rows, self.tiling.pieces * self.tiling.size
        assert self.seed is not None, "the op checks that a stochastic scheme has a seed"
        random = philox.element_bits(
            self.seed, rows * columns, rng_offset=self.rng_offset, purpose=purpose
        ).view(rows, columns)
        tiles = self.tiling.cut(random.t() if self.tiling.transpose else random, random.dtype)
        return stochastic_e2m1(scaled, tiles.view(scaled.shape))

    def random_bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        """32 random bits for each scale of a row-major matrix, as int64: word i for scale i."""
        assert self.seed is not None, "the op checks that a stochastic scheme has a seed"
        words = philox.words(
            self.seed, math.prod(shape), rng_offset=self.rng_offset, purpose=philox.RANDOM_BITS
        )
        return words.view(shape)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[n, m, lanes], m values per block -> [rows, m * blocks of a row]."""
        m = values.shape[1] * (self.tiling.size // self.scheme.width)
        outer = self.tiling.pieces if self.tiling.transpose else 1
        return self.tiling.join(values.reshape(outer, m, self.x.shape[2]))

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """[n, 1, lanes] -> [rows / rows of a block, blocks of a row]."""
        return self.join(scales)[:: self.scheme.block[0]].contiguous()

    def shared(self, per_row: torch.Tensor, *, total: bool = False) -> torch.Tensor:
        """The maximum (or sum) over the rows of a block, repeated for each of them, from a value
        for each row's part of the block, [n, 1, lanes]."""
        height = self.scheme.block[0]
        if height == 1:
            return per_row
        rows = per_row.view(self.tiling.rows // height, height, self.tiling.pieces)
        merged = sum_neighbors(rows) if total else rows.amax(1, keepdim=True)
        return merged.expand(rows.shape).reshape(per_row.shape)


def sum_neighbors(tiles: torch.Tensor) -> torch.Tensor:
    """Sum over the middle dimension (a power of two), neighbors first: [n, w, l] -> [n, 1, l]."""
    while tiles.shape[1] > 1:
        tiles = tiles[:, 0::2] + tiles[:, 1::2]
    return tiles


def or_one(x: torch.Tensor) -> torch.Tensor:
    """x with zeros replaced by one, as a divisor."""
    return torch.where(x == 0, 1.0, x)


def finite_reciprocal(numerator: torch.Tensor | float, scale: torch.Tensor) -> torch.Tensor:
    """numerator / scale, numerator where the scale is 0, and the largest fp32 where it overflows
    (scales under 2^-128): an Inf would turn the zeros of x into NaN."""
    return (numerator / or_one(scale)).clamp_(max=_HUGE)


def finite_or_nan(global_scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """NaN where the maximum that the global scale is computed from is not finite."""
    return torch.where(largest.isfinite(), global_scale, torch.nan)


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """max(x); 0 for an empty tensor, NaN if x has one."""
    return x.amax() if x.numel() else x.new_zeros(())


def poison(scales: torch.Tensor, poisoned: torch.Tensor) -> torch.Tensor:
    """Make e4m3 or e8m0 scales NaN, in place, where `poisoned` is set."""
    nan = 0x7F if scales.dtype == torch.float8_e4m3fn else 0xFF
    scales.view(torch.uint8).masked_fill_(poisoned, nan)
    return scales
