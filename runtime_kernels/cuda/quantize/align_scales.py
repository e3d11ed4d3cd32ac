# SPDX-License-Identifier: Apache-2.0
"""Variants of the tail kernels of quantizers, align_scales.cu and finalize_dequantized.cu. One
launch serves several calls (grouped_launch.py)."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from q2compile.runtime_kernels.cuda.calls import (
    MOST_OPERANDS,
    BufferSlot,
    LaunchStep,
    in_places,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SCALED_AFTERWARDS, ScaleRule
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme

_SCALES_PER_BLOCK = 256 * 8  # of a thread block of align_scales.cu
_MOST_COLUMNS = 32  # that a thread block adds up at once
_OPERAND = "PPPPPPPPqIifii"
_SUMS = "PPiiii"

Address = BufferSlot | int  # 0: there is no such tensor


class TailOperand(NamedTuple):
    """One rowwise or columnwise operand; scales.cuh has the same struct."""

    raw_scales: Address
    largest: Address
    seed: Address
    scales: Address
    global_scale: Address
    source_global: Address
    other: Address
    product: Address
    of_raw_scales: int
    rng_offset: int
    parts: int
    norm: float
    blocks: int
    partner: int


class Sums(NamedTuple):
    """Sums of the columns of an operand, by tiles; sums.cuh has the same struct."""

    partials: Address
    to: Address
    tiles: int
    columns: int
    pitch: int
    type: int  # of `to`, a number of SOURCES (rotate_quantize.py)


@dataclass(frozen=True)
class Alignment:
    """The tail of a quantizer: align_scales.cu or finalize_dequantized.cu. Plans with the same
    launch can share it (grouped_launch.py).

    operands: at most MOST_OPERANDS.
    thread_blocks: for each operand, and for each of the sums.
    sums: column sums that it adds up as well.
    summing: the variant that adds up sums, used in place of `launch` if there are any.
    """

    launch: Launch
    operands: tuple[TailOperand, ...]
    thread_blocks: int
    sums: tuple[Sums, ...] = ()
    summing: Launch | None = None

    @property
    def step(self) -> LaunchStep:
        if self.summing is None:
            grid = self.thread_blocks, len(self.operands)
            return LaunchStep(self.launch, grid, in_places(self.operands))
        values = [*in_places(self.operands), *in_places(self.sums), len(self.sums)]
        return LaunchStep(
            self.summing, (self.thread_blocks, len(self.operands) + len(self.sums)), values
        )


def align_launch(spec: Scheme, interleaved: bool, sums: bool = False) -> Launch:
    """align_scales.cu, or finalize_dequantized.cu for dequantized operands.

    interleaved: for chunks of 128.
    sums: the variant that also adds up column sums.
    """
    rule = ScaleRule.of(spec)
    if spec.dequantized and rule in SCALED_AFTERWARDS:
        return _align_launch(
            "finalize_dequantized.cu",
            Q2_POW2=1,
            Q2_STOCHASTIC=int(rule == ScaleRule.MS_EDEN),
            Q2_MX=0,
            Q2_INTERLEAVED=int(interleaved),
            Q2_SUMS=int(sums),
        )
    return _align_launch(
        "align_scales.cu",
        Q2_POW2=int(spec.global_scale == "pow2"),
        Q2_STOCHASTIC=int(rule == ScaleRule.MS_EDEN),
        Q2_MX=int(rule == ScaleRule.MX),
        Q2_INTERLEAVED=int(interleaved and rule != ScaleRule.MX),
        Q2_SWIZZLED=int(spec.swizzled and rule in SCALED_AFTERWARDS),
        Q2_SUMS=int(sums),
    )


@functools.cache
def _align_launch(file: str, **defines: int) -> Launch:
    layout = _OPERAND * MOST_OPERANDS
    if defines["Q2_SUMS"]:
        layout += _SUMS * MOST_OPERANDS + "i"
    return launch(file, layout, threads=256, overlaps=True, defines=defines)


def thread_blocks_of_sums(columns: int) -> int:
    """Thread blocks that add up the sums of this many columns."""
    return max(1, ceil_div(columns, _MOST_COLUMNS))


def thread_blocks_of(spec: Scheme, *sizes: tuple[int, int]) -> int:
    """Thread blocks of align_scales.cu. sizes: for each operand, its rows and blocks in a row."""
    most = 0
    for rows, blocks in sizes:
        if spec.swizzled:  # groups of eight in a row, and all rows of the last tile
            rows, blocks = ceil_div(rows, 128) * 128, ceil_div(blocks, 8) * 8
        most = max(most, rows * blocks)
    return max(1, ceil_div(most, _SCALES_PER_BLOCK))
