# SPDX-License-Identifier: Apache-2.0
"""What a call of the quantizers launches.

Two launches a call: rotate_quantize.cu makes the codes, align_scales.cu what has to wait for the
largest of them; generated code has one of the second for several calls (together.py). A scheme
whose global scale is the tensor's exact one needs that largest first: there rotate_quantize.cu goes
over the operand twice.

    rule      launches, in order
    MS_EDEN   codes and raw scales; scales and global scale from the raw scales
    POW2      the same
    MX        codes and scales; global scale
    EXACT     AMAX; codes, scales and global scale. No AMAX where the caller has it.

The second launch also adds up the sums of columns that the first has left, where they are asked
for.

A scheme that ends in @bf16 is dequantized: numbers instead of codes and scales. What is made of
raw scales then is numbers again, those whose scales turn out to be e4m3 subnormals
(finalize_dequantized.cu).
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.calls import At, Call, Output, Step
from q2compile.runtime_kernels.cuda.jit.launch import Launch, multiprocessors
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    Address,
    Alignment,
    Side,
    Sums,
    align_launch,
    thread_blocks_of,
    thread_blocks_of_sums,
)
from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    NO_OUTPUT,
    ROUNDED,
    ROUNDED_SWIZZLED,
    SOURCES,
    TILE,
    rotate_launch,
    several_launch,
    shared_memory,
    thread_shape,
)
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, SCALED_AT_ONCE, Rule
from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import ceil_div, padded, scales_shape
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.table import SPECS, SPLIT_SCALES, QuantizerCall

_MOST_RANDOM = 1 << 35  # Philox blocks of eight elements are counted in 32 bits
# Of a thread block, up to which a launch less pays off: where blockIdx.y says which operand, up
# to 3.5% more instructions are issued, of some 7 us a tile, and a launch takes 3 us of the device.
_FEW_TILES = 16


class Groups(NamedTuple):
    """Of the rows of x, which are kept apart along columns: where they end, where in the padded
    layout, and how many they are (ops/quantize.py)."""

    ends: Address
    padded_ends: Address
    number: int


class Produced(NamedTuple):
    """What x is computed from, or two of them, or its halves: the fields of the producer's struct,
    inputs and sizes."""

    producer: Producer
    fields: tuple[Address, ...]


class Summed(NamedTuple):
    """Sums of the columns of x: their number among the tensors of the call, and their dtype."""

    output: int
    dtype: torch.dtype


class Direction(NamedTuple):
    """Along rows or along columns: the seed of its signs and random bits, their stream, and the
    number of its first output among the tensors of the call: codes, scales, global scale, mask if
    any."""

    seed: Address
    stream: int
    first: int


def launches(
    source: int,
    spec: Scheme,
    rotation: Transform,
    directions: tuple[bool, bool],
    *,
    room: int,
    vectors: bool,
    amax_known: bool,
    grouped: bool = False,
    producer: Producer | None = None,
    sums: bool = False,
) -> tuple[Launch, ...]:
    """What a call launches, in order. room: bytes of shared memory of a multiprocessor."""
    kind = source, rotation, spec, *directions
    rotate = functools.partial(
        rotate_launch,
        *kind,
        room=room,
        vectors=vectors,
        grouped=grouped,
        producer=producer,
        sums=sums,
    )
    if Rule.of(spec) != Rule.EXACT:
        return rotate(), align_launch(spec, rotation.size == 128, sums)
    assert not sums, "no launch is left that could add them up"
    if amax_known:
        return (rotate(),)
    return rotate(amax=True), rotate(overlaps=True)


def last_launch(op: str, args: Sequence[Any]) -> Launch | None:
    """The launch that a call of a quantizer ends in, where other calls can end in it as well; None
    where there is none, and for other ops.

    args: all of the op's, of which the names of the scheme and the transform alone count.
    """
    if op in SPECS:
        call = QuantizerCall.of(op, args)
        return shared_launch(call.scheme, call.transform)
    if op == SPLIT_SCALES:
        _, scheme = args
        return shared_launch(get_scheme(scheme), get_transform("none"))
    return None


def shared_launch(spec: Scheme, rotation: Transform) -> Launch | None:
    """The same by scheme and transform."""
    return None if Rule.of(spec) == Rule.EXACT else align_launch(spec, rotation.size == 128)


class _Side(NamedTuple):
    """One direction's results."""

    direction: Direction
    rows: int
    blocks: int  # of 16, a row
    outputs: tuple[Output, ...]
    raw_scales: int  # numbers in the workspace that rotate_quantize.cu leaves for align_scales.cu


def _side(direction: Direction, rows: int, width: int, spec: Scheme) -> _Side:
    """width: of the contraction, padding included."""
    codes = Output((rows, width), torch.bfloat16)
    if not spec.dequantized:
        codes = Output((rows, width // 2), torch.uint8)
    dtype = torch.float8_e8m0fnu if spec.format == "mxfp4" else torch.float8_e4m3fn
    scales = Output(scales_shape(rows, width // spec.width, spec), dtype)
    outputs = [codes, scales, Output((), torch.float32)]
    if spec.masked:
        outputs.append(Output((rows, width // 8), torch.uint8))
    if spec.rounding == "sr" and rows * width > _MOST_RANDOM:
        raise ValueError(
            f"{spec.name} of {rows} x {width} numbers: the CUDA kernels draw random bits for at "
            "most 2^35 elements of one operand; quantize it in parts."
        )
    raw_scales = rows * width // 16 if Rule.of(spec) in SCALED_AFTERWARDS else 0
    return _Side(direction, rows, width // 16, tuple(outputs), raw_scales)


def quantizer_call(
    index: int,
    source: int,
    spec: Scheme,
    rotation: Transform,
    extents: tuple[int, int, int, int, int],
    directions: Sequence[Direction | None],
    operands: int,
    *,
    operand: tuple[Address, Address, Address],
    amax: Address = 0,
    vectors: bool = True,
    groups: Groups | None = None,
    produced: Produced | None = None,
    summed: Summed | None = None,
) -> Call:
    """For CUDA device `index`.

    extents: pitch, rows and columns of x, or of a half of it, and for codes the scales a row of
        theirs and the logarithm of the rows that share one.
    directions: along rows, along columns; of two operands that are computed at once, of each.
    operands: how many tensors the op is given.
    operand: x or its codes, its scales, its global scale.
    amax: the largest |x|, where the caller has it and the scheme takes it.
    groups: of rows, which are kept apart along columns.
    produced: x is computed in the kernel, and of `operand` there is nothing.
    summed: the columns of x are summed, too.
    """
    _, m, k, *_ = extents
    height = padded_rows(m, groups.number) if groups else padded(m, spec, rotation)
    along = directions[0] is not None, directions[1] is not None
    threads, blocks_per_multiprocessor = thread_shape(spec, along[0])
    rule = Rule.of(spec)
    # Swizzled scales of rotate_quantize.cu: so many that it comes by all of their last tile.
    whole = TILE if spec.swizzled and rule in SCALED_AT_ONCE else threads // 2
    across = max(1, ceil_div(k, whole)) * (whole // (threads // 2))
    tiles = ceil_div(height if groups else m, TILE) * across
    parts = max(1, min(tiles, blocks_per_multiprocessor * multiprocessors(index)))
    width = produced.producer.width if produced else k
    results = (m, padded(width, spec, rotation)), (width, height)
    sides = [each and _side(each, *results[i % 2], spec) for i, each in enumerate(directions)]
    # The kernel works on an nvfp4 source's code * scale * 2^-7.
    nvfp4 = source in (SOURCES["nvfp4"], SOURCES["nvfp4" + SWIZZLED], ROUNDED, ROUNDED_SWIZZLED)
    norm = rotation.norm * (128 if nvfp4 else 1)
    present = sorted(filter(None, sides), key=lambda side: side.direction.first)
    outputs = tuple(output for side in present for output in side.outputs)
    outputs += (Output((k,), summed.dtype),) if summed else ()
    workspace = At(operands + len(outputs))
    fields = _Fields(index, spec, rule, parts, sides, workspace, amax, rotation.signs == "fixed")
    sums, more = _sums(summed, workspace + fields.workspace_bytes, tiles, across, k, threads // 2)
    partials = tuple(each.partials for each in sums)
    walk = (*extents, tiles, across, norm, *fields.mask, *partials, *(groups or ()))
    walk += produced.fields if produced else ()
    launched = launches(
        source,
        spec,
        rotation,
        along,
        room=shared_memory(index),
        vectors=vectors,
        amax_known=bool(amax),
        grouped=groups is not None,
        producer=produced and produced.producer,
        sums=bool(sums),
    )
    several = several_launch(launched[0]) if tiles <= _FEW_TILES * parts else None
    steps = [Step(launched[0], (parts, 1), (*operand, *fields.outputs, *walk), several)]
    ending = None
    if rule != Rule.EXACT:
        factor = {Rule.MS_EDEN: norm, Rule.MX: 1 / spec.shrink}.get(rule, 1.0)
        source_global = operand[2] if rule == Rule.MS_EDEN else 0
        ending = fields.alignment(align_launch(spec, rotation.size == 128), source_global, factor)
        if sums:
            most = max(ending.thread_blocks, thread_blocks_of_sums(k))
            ending = replace(ending, thread_blocks=most, sums=sums, summing=launched[1])
        steps.append(ending.step)
    elif len(launched) == 2:
        steps.append(steps[0]._replace(launch=launched[1]))
    return Call(operands, outputs, fields.workspace_bytes + more, tuple(steps), ending)


def _sums(
    summed: Summed | None, end: At, tiles: int, across: int, columns: int, width: int
) -> tuple[tuple[Sums, ...], int]:
    """Where the sums of columns are, by tiles of `width` columns, from the end of the workspace on;
    and how many bytes more it has for them."""
    if summed is None:
        return (), 0
    down, pitch = tiles // across, across * width
    to_16 = -end.past % 16
    sums = Sums(*(end + to_16, At(summed.output), down, columns, pitch), SOURCES[summed.dtype])
    return (sums,), to_16 + 4 * down * pitch


class _Fields:
    """The parameters of both kernels that say where results and what is on the way to them lie."""

    def __init__(
        self,
        index: int,
        spec: Scheme,
        rule: Rule,
        parts: int,
        sides: Sequence[_Side | None],
        workspace: At,
        amax: Address,
        fixed_signs: bool,
    ) -> None:
        self._index, self._spec = index, spec
        self._present = [side for side in sides if side]
        room = sum(ceil_div(side.raw_scales, 4) * 4 for side in self._present)
        # Of each side the largest, and with finalize_dequantized.cu the smallest.
        extents = parts * (2 if room and spec.dequantized else 1)
        self.workspace_bytes = 4 * (room + extents * len(self._present))
        raw_scales, largest = workspace, workspace + 4 * room
        self.outputs: tuple[Any, ...] = ()
        self._ends: list[Side] = []
        for side in sides:
            if side is None:
                self.outputs += NO_OUTPUT
                continue
            seed, stream, first = side.direction
            codes, scales, unit = (At(first + i) for i in range(3))
            signs = 0 if fixed_signs else seed  # the kernel has the fixed seed
            made = raw_scales if room else scales
            self.outputs += (codes, made, amax or largest, unit, signs, seed)
            self.outputs += (side.rows, side.blocks, stream, 1 if amax else parts)
            finalized = codes if spec.dequantized else scales
            self._ends.append(
                Side(
                    *(
                        raw_scales,
                        largest,
                        seed,
                        finalized,
                        unit,
                        0,
                        0,
                        0,
                        side.raw_scales,
                        stream,
                        parts,
                    ),
                    norm=1.0,
                    blocks=max(1, side.blocks),
                    partner=-1,
                )
            )
            raw_scales, largest = (
                raw_scales + 4 * ceil_div(side.raw_scales, 4) * 4,
                largest + 4 * extents,
            )
        self.mask = (At(self._present[0].direction.first + 3),) if spec.masked else ()

    def alignment(self, launch: Launch, source_global: Address, factor: float) -> Alignment:
        """By align_scales.cu or finalize_dequantized.cu."""
        sizes = [(side.rows, side.blocks) if side.raw_scales else (0, 0) for side in self._present]
        made_by = thread_blocks_of(self._spec, *sizes)
        if (
            self._spec.dequantized
        ):  # thread blocks of finalize_dequantized.cu stay, or mostly leave at once
            made_by = min(made_by, 4 * multiprocessors(self._index))
        sides = (s._replace(source_global=source_global, norm=factor) for s in self._ends)
        return Alignment(launch, tuple(sides), made_by)
