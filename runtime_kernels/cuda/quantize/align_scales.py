"""Variants of align_scales.cu and settle_widened.cu, which end what rotate_quantize.cu began."""

import functools

from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, Rule
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme

_SCALES_PER_BLOCK = 256 * 8  # of a thread block of align_scales.cu
_SIDE = "PPPPPqIi"
_ALIGN = f"{_SIDE}{_SIDE}Pf"
NO_SIDE = (0,) * 8


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
    layout = _ALIGN + "ii" * defines["Q2_SWIZZLED"]
    return launch("align_scales.cu", layout, threads=256, overlaps=True, defines=defines)


@functools.cache
def _settle_launch(**defines: int) -> Launch:
    return launch("settle_widened.cu", _ALIGN, threads=256, overlaps=True, defines=defines)


def align_end(spec: Scheme, *blocks: int) -> tuple[int, ...]:
    """What align_scales.cu's Params end with: the blocks in a row of both directions."""
    swizzles = spec.swizzled and Rule.of(spec) in SCALED_AFTERWARDS
    return tuple(max(1, n) for n in blocks) if swizzles else ()


def align_grid(spec: Scheme, *sizes: tuple[int, int]) -> tuple[int, int]:
    """Thread blocks of align_scales.cu for the rows and the blocks in a row of each direction."""
    most = 0
    for rows, blocks in sizes:
        if spec.swizzled:  # eights of a row each, and all rows of the last tile
            rows, blocks = ceil_div(rows, 128) * 128, ceil_div(blocks, 8) * 8
        most = max(most, rows * blocks)
    return max(1, ceil_div(most, _SCALES_PER_BLOCK)), len(sizes)
