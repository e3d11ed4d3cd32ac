"""Variants of align_scales.cu and settle_widened.cu, which end what rotate_quantize.cu began; and
how one launch of them ends several calls at once."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from q2compile.runtime_kernels.cuda.calls import At, Step
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, Rule
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme

MOST_SIDES = 4  # of a launch
_SCALES_PER_BLOCK = 256 * 8  # of a thread block of align_scales.cu
_SIDE = "PPPPPPPPqIifii"

Address = At | int  # 0: there is no such tensor


class Side(NamedTuple):
    """One direction of one operand: scales.cuh has the same struct."""

    worths: Address
    largest: Address
    seed: Address
    scales: Address
    global_scale: Address
    source_global: Address
    other: Address
    product: Address
    of_worths: int
    stream: int
    parts: int
    norm: float
    blocks: int
    partner: int


_NO_SIDE = Side(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, -1)


@dataclass(frozen=True)
class Alignment:
    """The last step of a call of a quantiser.

    launch: of align_scales.cu or settle_widened.cu; calls that have the same can end in one launch.
    thread_blocks: for each side.
    """

    launch: Launch
    sides: tuple[Side, ...]
    thread_blocks: int

    @property
    def step(self) -> Step:
        assert len(self.sides) <= MOST_SIDES
        filled = (*self.sides, *(_NO_SIDE,) * (MOST_SIDES - len(self.sides)))
        values: Sequence[Any] = [field for side in filled for field in side]
        return Step(self.launch, (self.thread_blocks, len(self.sides)), values)


def align_launch(spec: Scheme, interleaved: bool) -> Launch:
    """align_scales.cu, or for numbers instead of codes settle_widened.cu. interleaved: of chunks of
    128."""
    rule = Rule.of(spec)
    if spec.widened and rule in SCALED_AFTERWARDS:
        return _settle_launch(
            Q2_POW2=1,
            Q2_STOCHASTIC=int(rule == Rule.MS_EDEN),
            Q2_MX=0,
            Q2_INTERLEAVED=int(interleaved),
        )
    return _align_launch(
        Q2_POW2=int(spec.global_scale == "pow2"),
        Q2_STOCHASTIC=int(rule == Rule.MS_EDEN),
        Q2_MX=int(rule == Rule.MX),
        Q2_INTERLEAVED=int(interleaved and rule != Rule.MX),
        Q2_SWIZZLED=int(spec.swizzled and rule in SCALED_AFTERWARDS),
    )


@functools.cache
def _align_launch(**defines: int) -> Launch:
    layout = _SIDE * MOST_SIDES
    return launch("align_scales.cu", layout, threads=256, overlaps=True, defines=defines)


@functools.cache
def _settle_launch(**defines: int) -> Launch:
    layout = _SIDE * MOST_SIDES
    return launch("settle_widened.cu", layout, threads=256, overlaps=True, defines=defines)


def thread_blocks_of(spec: Scheme, *sizes: tuple[int, int]) -> int:
    """Thread blocks of align_scales.cu for the rows and the blocks in a row of each direction."""
    most = 0
    for rows, blocks in sizes:
        if spec.swizzled:  # eights of a row each, and all rows of the last tile
            rows, blocks = ceil_div(rows, 128) * 128, ceil_div(blocks, 8) * 8
        most = max(most, rows * blocks)
    return max(1, ceil_div(most, _SCALES_PER_BLOCK))
