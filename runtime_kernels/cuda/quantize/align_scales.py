# SPDX-License-Identifier: Apache-2.0
"""Variants of align_scales.cu and finalize_dequantized.cu, which end what rotate_quantize.cu
began; and how one launch of them ends several calls at once."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from q2compile.runtime_kernels.cuda.calls import MOST_SIDES, At, Ending, Step, in_places
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, Rule
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme

_SCALES_PER_BLOCK = 256 * 8  # of a thread block of align_scales.cu
_MOST_COLUMNS = 32  # whose sums a thread block adds up at once
_SIDE = "PPPPPPPPqIifii"
_SUMS = "PPiiii"

Address = At | int  # 0: there is no such tensor


class Side(NamedTuple):
    """One direction of one operand: scales.cuh has the same struct."""

    raw_scales: Address
    largest: Address
    seed: Address
    scales: Address
    global_scale: Address
    source_global: Address
    other: Address
    product: Address
    of_raw_scales: int
    stream: int
    parts: int
    norm: float
    blocks: int
    partner: int


class Sums(NamedTuple):
    """Of the columns of an operand, by tiles: sums.cuh has the same struct."""

    partials: Address
    to: Address
    tiles: int
    columns: int
    pitch: int
    type: int  # of `to`: as SOURCES of rotate_quantize.py have it


@dataclass(frozen=True)
class Alignment(Ending):
    """The last step of a call of a quantizer, of align_scales.cu or finalize_dequantized.cu.

    thread_blocks: for each side, and for each of the sums.
    sums: of columns, that it adds up as well; summing: the launch that is taken in the place of the
        other if there are any.
    """

    thread_blocks: int
    sums: tuple[Sums, ...] = ()
    summing: Launch | None = None

    @property
    def step(self) -> Step:
        if self.summing is None:
            grid = self.thread_blocks, len(self.sides)
            return Step(self.launch, grid, in_places(self.sides))
        values = [*in_places(self.sides), *in_places(self.sums), len(self.sums)]
        return Step(self.summing, (self.thread_blocks, len(self.sides) + len(self.sums)), values)


def align_launch(spec: Scheme, interleaved: bool, sums: bool = False) -> Launch:
    """align_scales.cu, or for numbers instead of codes finalize_dequantized.cu. interleaved: of
    chunks of 128. sums: which adds up sums of columns, too."""
    rule = Rule.of(spec)
    if spec.dequantized and rule in SCALED_AFTERWARDS:
        return _align_launch(
            "finalize_dequantized.cu",
            Q2_POW2=1,
            Q2_STOCHASTIC=int(rule == Rule.MS_EDEN),
            Q2_MX=0,
            Q2_INTERLEAVED=int(interleaved),
            Q2_SUMS=int(sums),
        )
    return _align_launch(
        "align_scales.cu",
        Q2_POW2=int(spec.global_scale == "pow2"),
        Q2_STOCHASTIC=int(rule == Rule.MS_EDEN),
        Q2_MX=int(rule == Rule.MX),
        Q2_INTERLEAVED=int(interleaved and rule != Rule.MX),
        Q2_SWIZZLED=int(spec.swizzled and rule in SCALED_AFTERWARDS),
        Q2_SUMS=int(sums),
    )


@functools.cache
def _align_launch(file: str, **defines: int) -> Launch:
    layout = _SIDE * MOST_SIDES
    if defines["Q2_SUMS"]:
        layout += _SUMS * MOST_SIDES + "i"
    return launch(file, layout, threads=256, overlaps=True, defines=defines)


def thread_blocks_of_sums(columns: int) -> int:
    """Thread blocks that add up the sums of so many columns at once."""
    return max(1, ceil_div(columns, _MOST_COLUMNS))


def thread_blocks_of(spec: Scheme, *sizes: tuple[int, int]) -> int:
    """Thread blocks of align_scales.cu for the rows and the blocks in a row of each direction."""
    most = 0
    for rows, blocks in sizes:
        if spec.swizzled:  # eights of a row each, and all rows of the last tile
            rows, blocks = ceil_div(rows, 128) * 128, ceil_div(blocks, 8) * 8
        most = max(most, rows * blocks)
    return max(1, ceil_div(most, _SCALES_PER_BLOCK))
