# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the quantizers.

Two launches per call: rotate_quantize.cu makes the codes; the tail kernel, align_scales.cu, makes
what depends on the maximum of the whole tensor. Generated code has one tail launch for several
calls (grouped_launch.py). A scheme with an exact global scale needs the maximum first: there
rotate_quantize.cu reads the operand twice.

    rule      launches, in order
    MS_EDEN   codes and raw scales; scales and global scale from the raw scales
    POW2      the same
    MX        codes and scales; global scale
    EXACT     AMAX; codes, scales and global scale. No AMAX if the caller gives it.

The tail launch also adds up dbias, the sums of columns, from the sums of tiles that
rotate_quantize.cu has left.

A scheme whose name ends in @bf16 gives dequantized operands: bf16 elements instead of codes and
scales. Its tail kernel, finalize_dequantized.cu, changes those elements whose scales turn out to be
e4m3 subnormals.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.calls import BufferSlot, LaunchPlan, LaunchStep, Output
from q2compile.runtime_kernels.cuda.jit.launch import Launch, multiprocessors
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    Address,
    Alignment,
    Sums,
    TailOperand,
    align_launch,
    thread_blocks_of,
    thread_blocks_of_sums,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    NO_OUTPUT,
    ROUNDED,
    ROUNDED_SWIZZLED,
    SCALED_AFTERWARDS,
    SCALED_AT_ONCE,
    SOURCES,
    TILE,
    RotatingKernel,
    ScaleRule,
    batched_launch,
    rotate_launch,
    thread_shape,
)
from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import ceil_div, padded, scales_shape
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.table import SPECS, SPLIT_SCALES, QuantizerCall

# Kernels count in 32 bits: blocks of 16 elements, and Philox blocks, of eight elements each.
_MOST, _MOST_RANDOM = 1 << 36, 1 << 35
# Tiles of a thread block up to which a batched launch pays off: choosing the operand by blockIdx.y
# issues up to 4.5% more instructions, of some 7 us a tile; a launch takes 3 us of the device.
_FEW_TILES = 16


class Groups(NamedTuple):
    """Groups of rows of x, which are quantized separately columnwise: where they end, where they
    end in the padded layout, and how many there are (ops/quantize.py)."""

    ends: Address
    padded_ends: Address
    total: int


class Dbias(NamedTuple):
    """The sums of the columns of x: their number among the tensors of the call, and their dtype."""

    output: int
    dtype: torch.dtype


class OperandSlots(NamedTuple):
    """Where one operand's seed and results are. seed: of its signs and random bits. first: the
    number of its first output among the tensors of the call: codes, scales, global scale, and the
    mask if there is one."""

    seed: Address
    rng_offset: int
    first: int


def launches(kernel: RotatingKernel, amax_known: bool = False) -> tuple[Launch, ...]:
    """The launches of a call, in order."""
    if ScaleRule.of(kernel.spec) != ScaleRule.EXACT:
        tail = align_launch(kernel.spec, kernel.rotation.size == 128, kernel.dbias)
        return rotate_launch(kernel), tail
    assert not kernel.dbias, "there is no tail launch that could add up the sums"
    if amax_known:
        return (rotate_launch(kernel),)
    return rotate_launch(kernel, amax=True), rotate_launch(kernel, overlaps=True)


def tail_launch(op: str, args: Sequence[Any]) -> Launch | None:
    """The tail kernel of a quantizer, which other calls can share; None if it has none, and for
    other ops.

    args: all arguments of the op. Only the names of the scheme and the transform count.
    """
    if op in SPECS:
        call = QuantizerCall.of(op, args)
        return tail_launch_of_scheme(call.scheme, call.transform)
    if op == SPLIT_SCALES:
        _, scheme = args
        return tail_launch_of_scheme(get_scheme(scheme), get_transform("none"))
    return None


def tail_launch_of_scheme(spec: Scheme, rotation: Transform) -> Launch | None:
    """The tail kernel by scheme and transform, as `tail_launch` gives it."""
    rule = ScaleRule.of(spec)
    if rule == ScaleRule.EXACT or (rule == ScaleRule.MX and spec.is_transposable):
        return None
    return align_launch(spec, rotation.size == 128)


class _Operand(NamedTuple):
    """The results of one operand."""

    slots: OperandSlots
    rows: int
    blocks: int  # of 16, in a row
    outputs: tuple[Output, ...]
    raw_scales: int  # in the workspace, from rotate_quantize.cu for align_scales.cu


def _operand(slots: OperandSlots, rows: int, width: int, spec: Scheme) -> _Operand:
    """width: of the contraction, padding included."""
    codes = Output((rows, width), torch.bfloat16)
    if not spec.dequantized:
        codes = Output((rows, width // 2), torch.uint8)
    dtype = torch.float8_e8m0fnu if spec.format == "mxfp4" else torch.float8_e4m3fn
    scales = Output(scales_shape(rows, width // spec.width, spec), dtype)
    outputs = [codes, scales, Output((), torch.float32)]
    if spec.masked:
        outputs.append(Output((rows, width // 8), torch.uint8))
    most = _MOST_RANDOM if spec.rounding == "sr" else _MOST
    if rows * width > most:
        raise ValueError(
            f"q2::quantize or q2::requantize of an operand of {rows} x {width} elements by "
            f"{spec.name}: the CUDA kernels take at most 2^{most.bit_length() - 1} elements. "
            "Quantize it in parts of fewer rows."
        )
    raw_scales = rows * width // 16 if ScaleRule.of(spec) in SCALED_AFTERWARDS else 0
    return _Operand(slots, rows, width // 16, tuple(outputs), raw_scales)


def quantizer_plan(
    index: int,
    kernel: RotatingKernel,
    extents: tuple[int, int, int, int, int],
    operands: Sequence[OperandSlots | None],
    inputs: int,
    *,
    x: tuple[Address, Address, Address],
    amax: Address = 0,
    groups: Groups | None = None,
    dbias: Dbias | None = None,
) -> LaunchPlan:
    """The plan for CUDA device `index`.

    kernel: its directions, groups and dbias are those of the other arguments.
    extents: pitch, rows and columns of x. For codes also: the scales in a row of theirs, and the
        logarithm of the rows that share one.
    operands: rowwise, columnwise; for two matrices that are computed at once, these of each.
    inputs: how many tensors the op is given.
    x: x or its codes, its scales, its global scale; none where a prologue computes it, from the
        first inputs of the call.
    amax: the largest |x|, if the caller gives it and the scheme takes it.
    groups: of rows, which are quantized separately columnwise.
    dbias: the columns of x are summed, too.
    """
    spec, rotation, prologue = kernel.spec, kernel.rotation, kernel.prologue
    _, m, k, *_ = extents
    height = padded_rows(m, groups.total) if groups else padded(m, spec, rotation)
    threads, blocks_per_multiprocessor = thread_shape(spec, kernel.rowwise)
    rule = ScaleRule.of(spec)
    # Where rotate_quantize.cu writes swizzled scales, it writes all of their last tile.
    whole = TILE if spec.swizzled and rule in SCALED_AT_ONCE else threads // 2
    across = max(1, ceil_div(k, whole)) * (whole // (threads // 2))
    tiles = ceil_div(height if groups else m, TILE) * across
    parts = max(1, min(tiles, blocks_per_multiprocessor * multiprocessors(index)))
    of_rows = rotation if kernel.rotates_rows else get_transform("none")
    sizes = (m, padded(k, spec, of_rows)), (k, height)
    results = [each and _operand(each, *sizes[i % 2], spec) for i, each in enumerate(operands)]
    norm = _norm(kernel.source, rotation)
    present = sorted(filter(None, results), key=lambda operand: operand.slots.first)
    outputs = tuple(output for operand in present for output in operand.outputs)
    outputs += (Output((k,), dbias.dtype),) if dbias else ()
    workspace = BufferSlot(inputs + len(outputs))
    fields = _Fields(index, spec, rule, parts, results, workspace, amax, rotation.signs == "fixed")
    sums, more = _sums(dbias, workspace + fields.workspace_bytes, tiles, across, k, threads // 2)
    walk = (*extents, tiles, across, norm, *fields.mask, *(each.partials for each in sums))
    walk += (*(groups or ()), *map(BufferSlot, range(len(prologue.inputs) if prologue else 0)))
    launched = launches(kernel, bool(amax))
    batched = batched_launch(launched[0]) if tiles <= _FEW_TILES * parts else None
    steps = [LaunchStep(launched[0], (parts, 1), (*x, *fields.outputs, *walk), batched)]
    tail = None
    if rule != ScaleRule.EXACT:
        factor = {ScaleRule.MS_EDEN: norm, ScaleRule.MX: 1 / spec.shrink}.get(rule, 1.0)
        source_global = x[2] if rule == ScaleRule.MS_EDEN else 0
        tail = fields.alignment(align_launch(spec, rotation.size == 128), source_global, factor)
        if sums:
            most = max(tail.thread_blocks, thread_blocks_of_sums(k))
            tail = replace(tail, thread_blocks=most, sums=sums, summing=launched[1])
        steps.append(tail.step)
    elif len(launched) == 2:
        steps.append(steps[0]._replace(launch=launched[1]))
    return LaunchPlan(inputs, outputs, fields.workspace_bytes + more, tuple(steps), tail)


def _norm(source: int, rotation: Transform) -> float:
    """The rotation's norm; for nvfp4 sources the kernel works on code * scale * 2^-7."""
    nvfp4 = source in (SOURCES["nvfp4"], SOURCES["nvfp4" + SWIZZLED], ROUNDED, ROUNDED_SWIZZLED)
    return rotation.norm * (128 if nvfp4 else 1)


def _sums(
    dbias: Dbias | None, end: BufferSlot, tiles: int, across: int, columns: int, width: int
) -> tuple[tuple[Sums, ...], int]:
    """The sums of columns by tiles of `width` columns, from slot `end` of the workspace on; and the
    bytes that they add to it."""
    if dbias is None:
        return (), 0
    down, pitch = tiles // across, across * width
    to_16 = -end.byte_offset % 16
    sums = Sums(
        *(end + to_16, BufferSlot(dbias.output), down, columns, pitch), SOURCES[dbias.dtype]
    )
    return (sums,), to_16 + 4 * down * pitch


class _Fields:
    """The fields that both kernels have for results and for what is passed between them."""

    def __init__(
        self,
        index: int,
        spec: Scheme,
        rule: ScaleRule,
        parts: int,
        operands: Sequence[_Operand | None],
        workspace: BufferSlot,
        amax: Address,
        fixed_signs: bool,
    ) -> None:
        self._index, self._spec = index, spec
        self._present = [operand for operand in operands if operand]
        room = sum(ceil_div(operand.raw_scales, 4) * 4 for operand in self._present)
        # The largest of each operand; for finalize_dequantized.cu the smallest, too.
        extents = parts * (2 if room and spec.dequantized else 1)
        self.workspace_bytes = 4 * (room + extents * len(self._present))
        raw_scales, largest = workspace, workspace + 4 * room
        self.outputs: tuple[Any, ...] = ()
        self._ends: list[TailOperand] = []
        for operand in operands:
            if operand is None:
                self.outputs += NO_OUTPUT
                continue
            seed, rng_offset, first = operand.slots
            codes, scales, global_scale = (BufferSlot(first + i) for i in range(3))
            signs = 0 if fixed_signs else seed  # the kernel has the fixed seed
            made = raw_scales if room else scales
            self.outputs += (codes, made, amax or largest, global_scale, signs, seed)
            self.outputs += (operand.rows, operand.blocks, rng_offset, 1 if amax else parts)
            finalized = codes if spec.dequantized else scales
            self._ends.append(
                TailOperand(
                    *(raw_scales, largest, seed, finalized, global_scale, 0, 0, 0),
                    *(operand.raw_scales, rng_offset, parts),
                    norm=1.0,
                    blocks=max(1, operand.blocks),
                    partner=-1,
                )
            )
            raw_scales += 4 * ceil_div(operand.raw_scales, 4) * 4
            largest += 4 * extents
        self.mask = (BufferSlot(self._present[0].slots.first + 3),) if spec.masked else ()

    def alignment(self, launch: Launch, source_global: Address, factor: float) -> Alignment:
        """The tail, by align_scales.cu or finalize_dequantized.cu."""
        sizes = [(o.rows, o.blocks) if o.raw_scales else (0, 0) for o in self._present]
        made_by = thread_blocks_of(self._spec, *sizes)
        if self._spec.dequantized:  # most thread blocks of finalize_dequantized.cu end at once
            made_by = min(made_by, 4 * multiprocessors(self._index))
        ends = (o._replace(source_global=source_global, norm=factor) for o in self._ends)
        return Alignment(launch, tuple(ends), made_by)
