# SPDX-License-Identifier: Apache-2.0
"""Launch plans of transposable.cu: quantizers of scheme fp8 and of squares of MXFP4, and the
transpose of fp8 codes.

A quantizer of fp8 without an amax has two launches: the largest |x| of each thread block, then the
codes. With an amax it has only the second. Inductor can generate the rowwise quantizer, too, fused
with what computes x, at the cost of a longer first step (lowering/inductor_kernels).
"""

import functools
from collections.abc import Sequence

import torch

from q2compile.runtime_kernels.cuda.calls import BufferSlot, LaunchPlan, LaunchStep, Output, aligned
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.quantize.plan import Groups
from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import ceil_div, scales_shape
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall

_E4M3 = torch.float8_e4m3fn
_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, _E4M3: 3}
_LARGEST, _CODES, _SQUARES = range(3)  # Q2_WHAT
_THREADS = 256
_TILES = {_LARGEST: (128, 64), _CODES: (128, 64), _SQUARES: (32, 256)}
_PARTS = 512  # thread blocks that look for the largest element


def why_not(call: QuantizerCall) -> str | None:
    """None if transposable.cu serves a call whose scheme is transposable, otherwise the reason in
    words."""
    scheme = call.scheme
    if call.rotated or call.source_scheme is not None or scheme.dequantized:
        return f"transposable.cu makes codes of plain matrices, unlike {call.variant}"
    if call.grouped and call.args["amax"] is None:
        return "transposable.cu needs an amax for rows in groups: its own counts rows of no group"
    if not (scheme.is_tensorwise or scheme.rceil):
        return f"transposable.cu has squares of MXFP4, scheme {scheme.name} has others"
    return None


def code_launches(
    source: torch.dtype, rows: bool, columns: bool, has_amax: bool = True, grouped: bool = False
) -> list[Launch]:
    """The launches that make codes of fp8 along rows, columns or both, in order. grouped: the
    columns are laid out by groups of rows, which needs an amax."""
    first = [] if has_amax else [_launch(source, _LARGEST)]
    return [*first, _launch(source, _CODES, rows, columns, not has_amax, grouped)]


def launches(call: QuantizerCall, rows: bool, columns: bool) -> list[Launch]:
    """The launches of a call. rows, columns: along which its operands are in memory."""
    if call.scheme.is_tensorwise:
        has_amax = call.args["amax"] is not None
        return code_launches(call.x.dtype, rows, columns, has_amax, call.grouped)
    return [square_launch(call.x.dtype)]


def square_launch(source: torch.dtype) -> Launch:
    """The launch that makes codes and scales of squares."""
    return _launch(source, _SQUARES)


@functools.cache
def _launch(
    source: torch.dtype,
    what: int,
    rows: bool = True,
    columns: bool = False,
    follows: bool = False,
    grouped: bool = False,
) -> Launch:
    defines = {"Q2_SOURCE": _SOURCES[source], "Q2_WHAT": what, "Q2_ROWS": int(rows)}
    defines |= {"Q2_COLS": int(columns), "Q2_FOLLOWS": int(follows), "Q2_GROUPED": int(grouped)}
    layout = "PPPPPPPqiiiiiiii" + "PPi" * grouped
    return launch("transposable.cu", layout, _THREADS, overlaps=follows, defines=defines)


def quantizing_plan(
    call: QuantizerCall,
    x: torch.Tensor,
    firsts: Sequence[int | None],
    inputs: int,
    amax: BufferSlot | None,
    groups: Groups | None,
) -> LaunchPlan:
    """x: of the call, or its transpose. firsts: for the operand along the rows of x, and along its
    columns, the number of its first output among the tensors of the call; None without. inputs: how
    many tensors the call is given."""
    spec, dtype = call.scheme, _E4M3 if call.scheme.is_tensorwise else torch.float8_e8m0fnu
    height = padded_rows(x.shape[0], groups.total) if groups else x.shape[0]
    sizes = x.shape, (x.shape[1], height)
    made = [(i, size) for i, size in zip(firsts, sizes, strict=True) if i]
    outputs: list[Output] = []
    for _, (rows, contraction) in sorted(made):
        width = _padded(contraction, spec)
        scales = Output(scales_shape(rows, width // spec.width, spec), dtype)
        codes = Output((rows, width // spec.packed), spec.codes_dtype)
        outputs += [codes, scales, Output((), torch.float32)]
    slots = [(BufferSlot(i), BufferSlot(i + 2)) if i else (0, 0) for i in firsts]
    scales_slot = BufferSlot(inputs + 1) if spec.has_block_scales else 0
    looks = spec.takes_amax and amax is None
    largest = BufferSlot(inputs + len(outputs)) if looks else amax or 0
    launched = launches(call, *(i is not None for i in firsts))
    what = _CODES if spec.is_tensorwise else _SQUARES
    tiles, extents = _extents(x, x.shape, spec, what, height)
    parts = max(1, min(tiles, _PARTS))
    values = (
        BufferSlot(0),
        *slots[0],
        *slots[1],
        scales_slot,
        largest,
        *extents,
        parts,
        _vectors(x),
        *(groups or ()),
    )
    grids = [parts, max(1, tiles)][-len(launched) :]
    steps = [LaunchStep(one, (grid, 1), values) for one, grid in zip(launched, grids, strict=True)]
    return LaunchPlan(inputs, tuple(outputs), 4 * parts * looks, tuple(steps))


def transposing_plan(
    codes: torch.Tensor, rows: int, spec: Scheme, groups: Groups | None
) -> LaunchPlan:
    """Codes of fp8 [M, Kp] to [rows, Mp]. Scales, the second input and output, are empty."""
    height, inputs = codes.shape[0], 4 if groups else 2
    laid_out = padded_rows(height, groups.total) if groups else height
    tiles, extents = _extents(codes, (height, rows), spec, _CODES, laid_out)
    values = (BufferSlot(0), 0, 0, BufferSlot(inputs), 0, 0, 0, *extents, 0, _vectors(codes))
    (launched,) = code_launches(_E4M3, False, True, grouped=groups is not None)
    steps = (LaunchStep(launched, (tiles, 1), (*values, *(groups or ()))),) if tiles else ()
    outputs = Output((rows, _padded(laid_out, spec)), _E4M3), Output((0, 0), _E4M3)
    return LaunchPlan(inputs, outputs, 0, steps)


def _padded(size: int, spec: Scheme) -> int:
    return ceil_div(size, spec.width) * spec.width


def _extents(
    x: torch.Tensor, size: Sequence[int], spec: Scheme, what: int, laid_out: int
) -> tuple[int, tuple[int, ...]]:
    """The tiles of a matrix of this size in x, and the sizes that transposable.cu is given.
    laid_out: how many rows its columns have, in groups those of the padded layout."""
    (height, width), (rows, columns) = size, _TILES[what]
    across = max(1, ceil_div(width, columns))
    tiles = ceil_div(laid_out, rows) * across
    padded = _padded(width, spec), _padded(laid_out, spec)
    return tiles, (x.stride(0), height, width, *padded, across, tiles)


def _vectors(x: torch.Tensor) -> int:
    """1 if all rows of x [M, K] begin on 16 bytes, so that they are loaded as vectors, else 0."""
    return int(aligned(x) and x.stride(0) * x.element_size() % 16 == 0)
