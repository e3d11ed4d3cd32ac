# SPDX-License-Identifier: Apache-2.0
"""Variants of rotate_quantize.cu: source, scheme, rotation, rowwise and columnwise."""

import functools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.calls import MOST_OPERANDS
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.jit.limits import SHARED_KIB
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.prologue_source import FILE, cuda_source, layout
from q2compile.runtime_kernels.numerics.groups import spreads
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.table import QuantizerCall

ROUNDINGS = ("rtn", "sr", "ms_eden", "quest")  # of schemes that rotate_quantize.cu implements


class ScaleRule(IntEnum):
    """Q2_RULE of rotate_quantize.cu."""

    MS_EDEN = 0
    POW2 = 1
    EXACT = 2
    MX = 3
    AMAX = 4

    @staticmethod
    def of(spec: Scheme) -> "ScaleRule":
        if spec.rounding == "ms_eden":
            return ScaleRule.MS_EDEN
        if spec.format == "mxfp4":
            return ScaleRule.MX
        return ScaleRule.EXACT if spec.takes_amax else ScaleRule.POW2


SCALED_AFTERWARDS = (ScaleRule.MS_EDEN, ScaleRule.POW2)  # whose scales align_scales.cu makes
SCALED_AT_ONCE = (ScaleRule.EXACT, ScaleRule.MX)  # whose scales rotate_quantize.cu makes
# Sources of rotate_quantize.cu: the dtype of x; or the format of codes, with SWIZZLED for swizzled
# scales.
SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, "nvfp4": 3, "mxfp4": 4}
SOURCES |= {"nvfp4" + SWIZZLED: 5, "mxfp4" + SWIZZLED: 6}
# bf16 that is rounded to nvfp4 codes by given scales.
ROUNDED, ROUNDED_SWIZZLED = 7, 8
_FP32 = SOURCES[torch.float32]
TILE = 128
_FILE = "rotate_quantize.cu"
# Bytes of shared memory.
_STAGED = 8 * (2 * 256 + 16) - 16  # of a warp (dequantized.cuh)
_SIGNS = 4 * TILE  # of a thread block with dbias, besides
_MASKS = 8 * TILE  # of a thread block with a second operand, besides
_BESIDES = 1024 + 864  # of a thread block: reserved by CUDA, and static variables
_FOR_ROWS, _FOR_GROUPS = 240, 64  # of those, what is needed rowwise, and for groups
_FACTORS = 8 * 256  # for a source that is rounded to scales, besides (round_to_scales.cuh)
# Parameter structs, in the notation of Python's struct module.
_OUTPUT = "PPPPPPiiIi"
_SOURCE, _WALK = "PPP", "qiiiiiif"
NO_OUTPUT = (0,) * 10


@functools.cache
def not_served(
    scheme: str, transform: str, *, masked: bool = False, rotates_rows: bool = True
) -> str | None:
    """None if rotate_quantize.cu has this scheme, otherwise the reason in words. masked: for a call
    that writes a trust mask. rotates_rows: if not, for a transform of columns alone."""
    spec = get_scheme(scheme)
    if spec.is_tensorwise:
        return f"rotate_quantize.cu rounds to e2m1, scheme {scheme} to e4m3"
    if spec.rounding not in ROUNDINGS:
        return f"rotate_quantize.cu does not round by {spec.rounding!r}, as scheme {scheme} does"
    if spec.dequantized and spec.masked:
        return f"dequantized.cuh writes no trust mask, which {scheme} has"
    if not rotates_rows and (spec.rounding == "ms_eden" or get_transform(transform).size == TILE):
        return f"rotate_quantize.cu rotates rows, too, with scheme {scheme} and {transform}"
    if (
        spec.dequantized
        and ScaleRule.of(spec) == ScaleRule.MS_EDEN
        and not _finalizes(scheme, transform)
    ):
        return "dequantized.cuh rounds scales of chunks of 128 only under a power of two"
    if spec.selects and spec.rounding != "rtn":
        return f"rotate_quantize.cu rounds 4/6 to nearest only, scheme {scheme} draws random bits"
    if spec.masked and not masked:
        return f"scheme {scheme} wants a trust mask, which q2::quantize writes with mask=True"
    if spec.block[0] != 1:
        return f"rotate_quantize.cu has blocks of one row, scheme {scheme} has square ones"
    return None


def _finalizes(scheme: str, transform: str) -> bool:
    return get_scheme(scheme).global_scale == "pow2" and get_transform(transform).size == 128


class RotatingKernel(NamedTuple):
    """The properties that select a variant of rotate_quantize.cu.

    source: of SOURCES, ROUNDED or ROUNDED_SWIZZLED.
    room: bytes of shared memory of a multiprocessor.
    vectors: rows of x start on 16 bytes.
    grouped: columnwise by groups of rows.
    prologue: computes x in the kernel.
    dbias: the columns of x are summed, too.
    rotates_rows: if not, the transform is of the columnwise operand alone.
    """

    source: int
    rotation: Transform
    spec: Scheme
    rowwise: bool
    columnwise: bool
    room: int = 228 * 1024
    vectors: bool = True
    grouped: bool = False
    prologue: PrologueExpression | None = None
    dbias: bool = False
    rotates_rows: bool = True

    @staticmethod
    def of(call: QuantizerCall, source: int, index: int, **more: Any) -> "RotatingKernel":
        """The variant for a call on CUDA device `index`. more: other fields."""
        how: dict[str, Any] = {
            "room": shared_memory(index),
            "grouped": call.grouped,
            "dbias": call.dbias is not None,
            "rotates_rows": call.rotates_rows,
        }
        directions = call.rowwise, call.columnwise
        kernel = RotatingKernel(source, call.transform, call.scheme, *directions, **how)
        return kernel._replace(**more)


def rotate_launch(kernel: RotatingKernel, amax: bool = False, overlaps: bool = False) -> Launch:
    """The launch of a variant.

    amax: only the largest magnitude of the rotated matrix, no codes.
    overlaps: it follows AMAX on the same x, so it may start early. After another kernel it may not:
        that one might still be writing x.
    """
    source, rotation, spec, rowwise, columnwise, room, vectors, grouped, *_ = kernel
    prologue, dbias = kernel.prologue, kernel.dbias
    rule = ScaleRule.AMAX if amax else ScaleRule.of(spec)
    rounds = rule not in (ScaleRule.MS_EDEN, ScaleRule.AMAX)
    stochastic = rounds and spec.rounding == "sr"
    # Whether a block's largest magnitude can land above the largest code, and must be clipped.
    clips = rule == ScaleRule.EXACT or (rule == ScaleRule.POW2 and stochastic)
    clips = clips or (rule == ScaleRule.MX and spec.shrink == 1.0 and not spec.rceil)
    clips = clips or any(step < 0 for step in spec.steps)
    dequantized = spec.dequantized and not amax
    threads, blocks_per_multiprocessor = thread_shape(spec, rowwise)
    operands = len(prologue.results) if prologue else 1
    tile = operands * _tile_bytes(source, threads)
    staged = _staged_bytes(dequantized, threads)
    besides = staged + dbias * _SIGNS - (not rowwise) * _FOR_ROWS - (not grouped) * _FOR_GROUPS
    rounded = source in (ROUNDED, ROUNDED_SWIZZLED)
    besides += rounded * _FACTORS
    one = source == _FP32 or operands > 1
    stages = 1 if one else stages_in(room, blocks_per_multiprocessor, tile, besides)
    return _rotate_launch(
        threads,
        stages * tile + staged,
        overlaps,
        prologue,
        Q2_STAGES=stages,
        Q2_THREADS=threads,
        Q2_BLOCKS_PER_SM=blocks_per_multiprocessor,
        Q2_SOURCE=source,
        Q2_SIZE=rotation.size,
        Q2_ROTATES_ROWS=int(kernel.rotates_rows),
        Q2_SIGNED={"none": 0, "seed": 1, "fixed": 2}[rotation.signs],
        Q2_ROWS=int(rowwise),
        Q2_COLS=int(columnwise),
        Q2_VECTORS=int(vectors),
        Q2_DEQUANTIZED=int(dequantized),
        Q2_RULE=int(rule),
        Q2_STOCHASTIC=int(stochastic),
        Q2_CLIPS=int(clips),
        Q2_HEADROOM=int(rounds and spec.vmax != E2M1_MAX),
        Q2_RCEIL=int(rounds and spec.rceil),
        Q2_SHRINKS=int(rule == ScaleRule.MX and spec.shrink != 1.0),
        Q2_SELECTS=int(rounds and spec.selects),
        Q2_STEPS=_packed(spec.steps) if rounds else 0,
        Q2_SWIZZLED=int(spec.swizzled and rule in SCALED_AT_ONCE),
        Q2_MASKED=int(spec.masked),
        Q2_GROUPED=int(grouped),
        Q2_SPREAD=int(grouped and spreads(spec, rotation)),
        Q2_SUMS=int(dbias),
        Q2_OPERANDS=operands,
        Q2_BATCH=0,
    )


def _packed(steps: Sequence[int]) -> int:
    """The steps of a scale search in the format of rounding.cuh's kSteps. The first one, 0, is left
    out."""
    return sum((step + 8) << 4 * i for i, step in enumerate(steps[1:]))


@functools.cache
def _rotate_launch(
    threads: int, shared: int, overlaps: bool, prologue: PrologueExpression | None, **defines: int
) -> Launch:
    headers: tuple[tuple[str, str], ...] = ()
    fields = (
        _SOURCE
        + 2 * _OUTPUT * defines["Q2_OPERANDS"]
        + _WALK
        + "P" * defines["Q2_MASKED"]
        + "P" * defines["Q2_SUMS"]
        + "PPi" * defines["Q2_GROUPED"]
    )
    if prologue is not None:
        defines["Q2_PROLOGUE"] = 1
        fields += layout(prologue)
        headers = ((FILE, cuda_source(prologue)),)
    return launch(
        _FILE, fields, threads, shared, overlaps=overlaps, defines=defines, headers=headers
    )


@functools.cache
def batched_launch(one: Launch) -> Launch | None:
    """The variant for several operands, chosen by blockIdx.y: MOST_OPERANDS structs side by side.

    None for
    - other kernels than rotate_quantize.cu
    - an operand with a prologue, and one whose maximum is needed first
    - variants that would spill registers, since choosing a struct takes some: both rowwise and
      columnwise with MX or dbias; rowwise dequantized with random bits
    """
    if one.variant.file != _FILE or one.variant.headers:
        return None
    defines = {name: value for name, value in one.variant.defines if name != "Q2_PARAMS_BYTES"}
    rule, rows = defines["Q2_RULE"], defines["Q2_ROWS"]
    spills = defines["Q2_COLS"] and (rule == ScaleRule.MX or defines["Q2_SUMS"])
    spills = spills or (defines["Q2_STOCHASTIC"] and defines["Q2_DEQUANTIZED"])
    if rule in (ScaleRule.EXACT, ScaleRule.AMAX) or (rows and spills):
        return None
    defines["Q2_BATCH"] = MOST_OPERANDS
    return launch(_FILE, MOST_OPERANDS * one.layout, one.threads, one.shared, defines=defines)


@functools.cache
def shared_memory(index: int) -> int:
    """Bytes of shared memory of a multiprocessor of a CUDA device. Without CUDA: by the capability
    that is pretended."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor
    return 1024 * SHARED_KIB.get(torch.cuda.get_device_capability(index), 100)


def has_room_for_two(source: int, spec: Scheme, rowwise: bool, room: int) -> bool:
    """Whether as many thread blocks fit on a multiprocessor if each has tiles of two operands."""
    threads, blocks = thread_shape(spec, rowwise)
    bytes_ = 2 * _tile_bytes(source, threads) + _staged_bytes(spec.dequantized, threads)
    return blocks * (bytes_ + _BESIDES + _MASKS) <= room


def _tile_bytes(source: int, threads: int) -> int:
    return TILE * (threads // 2) * (4 if source == _FP32 else 2)


def _staged_bytes(dequantized: bool, threads: int) -> int:
    return dequantized * threads // 32 * _STAGED


def stages_in(room: int, blocks: int, tile: int, staged: int) -> int:
    """Tiles of a thread block in shared memory: one is loaded while the other is worked on.

    Two, unless with one tile more of the wanted thread blocks fit on a multiprocessor: those wait
    for their loads in turn. (8.6, 8.9, 12.x: two thread blocks of 256 threads instead of one.)
    """
    one, two = (min(blocks, room // (n * tile + staged + _BESIDES)) for n in (1, 2))
    return 1 if one > two else 2


def thread_shape(spec: Scheme, rowwise: bool) -> tuple[int, int]:
    """Threads of a thread block, and thread blocks on a multiprocessor at once.

    A thread holds 64 elements and needs 128 registers, so a multiprocessor runs 512 threads. With
    random bits a thread needs more registers. Columnwise alone, fewer threads are as fast. A tile
    has half as many columns as a thread block has threads; rowwise it must hold a chunk of 128.
    """
    if rowwise:
        return 256, 2
    return 128, 3 if spec.rounding == "sr" else 4
