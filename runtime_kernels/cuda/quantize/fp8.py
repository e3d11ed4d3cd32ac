# SPDX-License-Identifier: Apache-2.0
"""Launch plans of fp8.cu: the quantizer of scheme fp8, and the transpose of its codes.

A quantizer without an amax has two launches: the largest |x| of each thread block, then the codes.
With an amax it has only the second. Inductor can generate the same (lowering/inductor_kernels):
fused with what computes x, at the cost of a longer first step.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import BufferSlot, LaunchPlan, LaunchStep, Output, aligned
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.numerics.layout import ceil_div

_CODES = torch.float8_e4m3fn
_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, _CODES: 3}
_THREADS, _TILE = 256, (128, 64)
_PARTS = 512  # thread blocks that look for the largest element
_UNIT = 16  # of the contraction
_NO_SCALES = Output((0, 0), _CODES)


@functools.cache
def fp8_launch(
    source: torch.dtype, rows: bool, columns: bool, largest: bool = False, follows: bool = False
) -> Launch:
    """fp8.cu for codes along rows, columns or both.

    largest: the launch that looks for the largest element.  follows: the one after it.
    """
    defines = {
        "Q2_SOURCE": _SOURCES[source],
        "Q2_LARGEST": int(largest),
        "Q2_FOLLOWS": int(follows),
    }
    defines |= {"Q2_ROWS": int(rows), "Q2_COLS": int(columns)}
    return launch("fp8.cu", "PPPPPPqiiiiiiii", _THREADS, overlaps=follows, defines=defines)


def fp8_launches(source: torch.dtype, rows: bool, columns: bool, has_amax: bool) -> list[Launch]:
    """The launches of a quantizer, in order."""
    first = [] if has_amax else [fp8_launch(source, False, False, largest=True)]
    return [*first, fp8_launch(source, rows, columns, follows=not has_amax)]


def quantizing_plan(
    x: torch.Tensor, firsts: Sequence[int | None], inputs: int, amax: BufferSlot | None
) -> LaunchPlan:
    """firsts: the number of the first output of the operand along rows, and along columns, among
    the tensors of the call, of which `inputs` are given."""
    made = [(first, shape) for first, shape in zip(firsts, _shapes(x), strict=True)]
    outputs: list[Output] = []
    for _, shape in sorted((first, shape) for first, shape in made if first is not None):
        outputs += [Output(shape, _CODES), _NO_SCALES, Output((), torch.float32)]
    largest = BufferSlot(inputs + len(outputs)) if amax is None else amax
    slots = [(0, 0) if i is None else (BufferSlot(i), BufferSlot(i + 2)) for i in firsts]
    tiles, extents = _extents(x, x.shape)
    parts = max(1, min(tiles, _PARTS))
    values = (BufferSlot(0), *slots[0], *slots[1], largest, *extents, parts, _vectors(x))
    kinds = (first is not None for first in firsts)
    launched = fp8_launches(x.dtype, *kinds, has_amax=amax is not None)
    grids = (parts, max(1, tiles))[-len(launched) :]
    steps = tuple(LaunchStep(*each, values) for each in _with_grids(launched, grids))
    return LaunchPlan(inputs, tuple(outputs), 4 * parts if amax is None else 0, steps)


def transposing_plan(codes: torch.Tensor, rows: int) -> LaunchPlan:
    """Codes [M, Kp] to [rows, Mp]; scales, the second input, are empty."""
    made, size = Output(_shapes(codes[:, :rows])[1], _CODES), (codes.shape[0], rows)
    tiles, extents = _extents(codes, size)
    values = (BufferSlot(0), 0, 0, BufferSlot(2), 0, 0, *extents, 0, _vectors(codes))
    steps = (LaunchStep(fp8_launch(_CODES, False, True), (tiles, 1), values),) if tiles else ()
    return LaunchPlan(2, (made, _NO_SCALES), 0, steps)


def _with_grids(launched: Sequence[Launch], grids: Sequence[int]) -> Any:
    return ((each, (grid, 1)) for each, grid in zip(launched, grids, strict=True))


def _shapes(x: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the codes along rows and along columns."""
    height, width = x.shape
    return (height, _padded(width)), (width, _padded(height))


def _padded(size: int) -> int:
    return ceil_div(size, _UNIT) * _UNIT


def _extents(x: torch.Tensor, size: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The tiles of a matrix of this size in x, and the sizes that fp8.cu is given."""
    height, width = size
    across = max(1, ceil_div(width, _TILE[1]))
    tiles = ceil_div(height, _TILE[0]) * across
    return tiles, (x.stride(0), height, width, _padded(width), _padded(height), across, tiles)


def _vectors(x: torch.Tensor) -> int:
    """Whether rows of x begin on 16 bytes."""
    return int(aligned(x) and x.stride(0) * x.element_size() % 16 == 0)
