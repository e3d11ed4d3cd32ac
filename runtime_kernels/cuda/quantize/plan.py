"""What a call of the rotating quantisers launches, worked out once for each kind of operand.

Two launches a call: rotate_quantize.cu makes the codes, align_scales.cu what has to wait for the
largest of them. A scheme whose global scale is the tensor's exact one needs that largest first:
there rotate_quantize.cu goes over the operand twice.

    rule      launches, in order
    MS_EDEN   codes and worths; scales and global scale from the worths
    POW2      the same
    MX        codes and scales; global scale
    EXACT     AMAX; codes, scales and global scale. No AMAX where the caller has it.

A scheme that ends in @bf16 is widened: numbers instead of codes and scales. What is made of worths
then is numbers again, those whose scales turn out to be e4m3 subnormals (settle_widened.cu).
"""

import functools
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.cuda.jit.launch import Launch, empty, multiprocessors, on_device
from q2compile.runtime_kernels.cuda.quantize.align_scales import (
    NO_SIDE,
    align_end,
    align_grid,
    align_launch,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    NO_OUTPUT,
    SOURCES,
    TILE,
    rotate_launch,
    thread_shape,
)
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, SCALED_AT_ONCE, Rule
from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import ceil_div, padded, scales_shape
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme
from q2compile.runtime_kernels.numerics.transforms import FIXED_SIGN_SEED, Transform

_MOST_COINS = 1 << 34  # Philox blocks of four are counted in 32 bits

Quantized = tuple[torch.Tensor, ...]  # codes, scales, global scale, and a mask where there is one
Draw = tuple[torch.Tensor | None, int]  # of a direction: the seed of its signs and coins, a stream


def launches(
    source: int,
    spec: Scheme,
    rotation: Transform,
    directions: tuple[bool, bool],
    *,
    vectors: bool,
    amax_known: bool,
    grouped: bool = False,
) -> tuple[Launch, ...]:
    """What a call launches, in order."""
    rotate = functools.partial(
        rotate_launch, source, rotation, spec, *directions, vectors=vectors, grouped=grouped
    )
    if Rule.of(spec) != Rule.EXACT:
        return rotate(), align_launch(spec, rotation.size == 128)
    if amax_known:
        return (rotate(),)
    return rotate(amax=True), rotate(overlaps=True)


class _Side(NamedTuple):
    """One direction's results."""

    rows: int
    blocks: int  # of 16, a row
    scales_shape: tuple[int, int]
    scale_dtype: torch.dtype
    widened: bool

    @property
    def worths(self) -> int:
        return self.rows * self.blocks


class Plan(NamedTuple):
    """All of a call that follows from the kind of its operand."""

    device: int
    launches: tuple[Launch, ...]  # in order
    rule: Rule
    walk: tuple  # the fields of rotate_quantize.cu's Params after its outputs
    parts: int  # thread blocks of a rotate_quantize.cu, each of which leaves its largest
    room: int  # numbers in the workspace before those
    align_grid: tuple[int, int]
    sides: tuple[_Side | None, _Side | None]
    align_end: tuple  # the last fields of align_scales.cu's Params, from `norm` on
    fixed_signs: bool
    masked: bool


def make_plan(
    index: int,
    source: int,
    spec: Scheme,
    rotation: Transform,
    extents: tuple[int, int, int, int, int],
    directions: tuple[bool, bool],
    *,
    vectors: bool = True,
    amax_known: bool = False,
    groups: int = 0,
) -> Plan:
    """For CUDA device `index`.

    extents: pitch, rows and columns of x, and for codes the scales a row of theirs and the
        logarithm of the rows that share one.
    directions: along rows, along columns.
    groups: of rows, which are kept apart along columns; 0 for a plain matrix.
    """
    _, m, k, *_ = extents
    contracted = padded_rows(m, groups) if groups else padded(m, spec, rotation)
    threads, blocks_per_multiprocessor = thread_shape(spec, directions[0])
    rule = Rule.of(spec)
    # Swizzled scales of rotate_quantize.cu: so many that it comes by all of their last tile.
    whole = TILE if spec.swizzled and rule in SCALED_AT_ONCE else threads // 2
    across = max(1, ceil_div(k, whole)) * (whole // (threads // 2))
    tiles = ceil_div(contracted if groups else m, TILE) * across
    dtype = torch.float8_e8m0fnu if spec.format == "mxfp4" else torch.float8_e4m3fn
    sides = tuple(
        _Side(rows, width // 16, scales_shape(rows, width // spec.width, spec), dtype, spec.widened)
        if wanted
        else None
        for rows, width, wanted in (
            (m, padded(k, spec, rotation), directions[0]),
            (k, contracted, directions[1]),
        )
    )
    present = [side for side in sides if side]
    if spec.rounding == "sr" and any(16 * side.worths > _MOST_COINS for side in present):
        raise ValueError(
            f"{spec.name} of {m} x {k} numbers: the CUDA kernels draw coins for at most 2^34 "
            "numbers of one operand; quantise it in parts."
        )
    order = [*present, None][:2]
    worths = rule in SCALED_AFTERWARDS
    sizes = [(side.rows, side.blocks) if worths else (0, 0) for side in present]
    made_by, of_sides = align_grid(spec, *sizes)
    if spec.widened:  # thread blocks of settle_widened.cu stay for more, or mostly leave at once
        made_by = min(made_by, 2 * multiprocessors(index))
    # The kernel works on an nvfp4 source's code * scale * 2^-7.
    nvfp4 = source in (SOURCES["nvfp4"], SOURCES["nvfp4" + SWIZZLED])
    norm = rotation.norm * (128 if nvfp4 else 1)
    return Plan(
        index,
        launches(
            *(source, spec, rotation, directions),
            vectors=vectors,
            amax_known=amax_known,
            grouped=groups > 0,
        ),
        rule,
        (*extents, tiles, across, norm),
        max(1, min(tiles, blocks_per_multiprocessor * multiprocessors(index))),
        sum(ceil_div(side.worths, 4) * 4 for side in present) if worths else 0,
        (made_by, of_sides),
        sides,  # type: ignore[arg-type]
        ({Rule.MS_EDEN: norm, Rule.MX: 1 / spec.shrink}.get(rule, 1.0),)
        + align_end(spec, *(side.blocks if side else 0 for side in order)),
        rotation.signs == "fixed",
        spec.masked,
    )


@on_device
def _run(
    index: int, plan: Plan, operand: tuple[int, int, int], draws: tuple, amax: int, last: tuple
) -> list[Quantized]:
    sides = [(s, d) for s, d in zip(plan.sides, draws, strict=True) if s]
    parts = plan.parts
    # Of each side the largest, and with settle_widened.cu the smallest.
    extents = parts * (2 if plan.room and sides[0][0].widened else 1)
    workspace = empty((plan.room + extents * len(sides),), (1,), torch.float32)
    worths = workspace.data_ptr()
    largest = worths + 4 * plan.room
    outputs: list[tuple] = []
    ends: tuple = ()
    results: list[Quantized] = []
    for side, (seed, stream) in sides:
        rows, blocks, shape, dtype, widened = side
        width, element = (16 * blocks, torch.bfloat16) if widened else (8 * blocks, torch.uint8)
        codes = empty((rows, width), (width, 1), element)
        scales = empty(shape, (shape[1], 1), dtype)
        global_scale = empty((), (), torch.float32)
        results.append((codes, scales, global_scale))
        scales_at, unit_at = scales.data_ptr(), global_scale.data_ptr()
        seed_at = 0 if seed is None else seed.data_ptr()
        signs_at = _fixed_seed(index).data_ptr() if plan.fixed_signs else seed_at
        made_at = worths if plan.room else scales_at
        outputs.append(
            (codes.data_ptr(), made_at, amax or largest, unit_at, signs_at, seed_at)
            + (rows, blocks, stream, 1 if amax else parts)
        )
        count = rows * blocks if plan.room else 0
        settled_at = codes.data_ptr() if widened else scales_at
        ends += (worths, largest, seed_at, settled_at, unit_at, count, stream, parts)
        worths, largest = worths + 4 * ceil_div(count, 4) * 4, largest + 4 * extents
    if len(sides) == 1:
        both = (*outputs[0], *NO_OUTPUT) if plan.sides[0] else (*NO_OUTPUT, *outputs[0])
        ends += NO_SIDE
    else:
        both = (*outputs[0], *outputs[1])
    values = (*operand, *both, *plan.walk)
    if plan.masked:
        mask = empty((rows, 2 * blocks), (2 * blocks, 1), torch.uint8)
        results = [(*results[0], mask)]
        values += (mask.data_ptr(),)
    values += last
    first, *second = plan.launches
    first(index, (parts, 1), *values)
    if plan.rule == Rule.EXACT:
        for again in second:
            again(index, (parts, 1), *values)
    else:
        source_global = operand[2] if plan.rule == Rule.MS_EDEN else 0
        second[0](index, plan.align_grid, *ends, source_global, *plan.align_end)
    return results


def run(
    plan: Plan,
    operand: tuple[int, int, int],
    along_rows: Draw | None,
    along_cols: Draw | None,
    amax: int = 0,
    last: tuple = (),
) -> list[Quantized]:
    """The results of the directions that the plan has, rows first.

    operand: addresses of x, its scales, its global scale; 0 for what it has not.
    amax: address of the largest |x|, for an EXACT plan that knows it.
    last: the last fields of rotate_quantize.cu's Params: for groups the addresses of their ends and
        of those in the padded layout, and their number.
    """
    return _run(plan.device, plan, operand, (along_rows, along_cols), amax, last)


@functools.cache
def _fixed_seed(index: int) -> torch.Tensor:
    return torch.full((), FIXED_SIGN_SEED, dtype=torch.int64, device=torch.device("cuda", index))
