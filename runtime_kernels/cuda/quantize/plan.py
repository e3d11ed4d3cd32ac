"""What a call of the rotating quantisers launches, worked out once for each kind of operand.

Two launches a call: rotate_quantize.cu makes the codes, align_scales.cu what has to wait for the
largest of them. A scheme whose global scale is the tensor's exact one needs that largest first:
there rotate_quantize.cu goes over the operand twice.

    rule      launches, in order
    MS_EDEN   codes and worths; scales and global scale from the worths
    POW2      the same
    MX        codes and scales; global scale
    EXACT     AMAX; codes, scales and global scale. No AMAX where the caller has it.

A scheme that ends in @bf16 gets values instead of codes and scales; what is made of worths then is
values again, those whose scales turn out to be e4m3 subnormals (settle_values.cu).
"""

import functools
from enum import IntEnum
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.cuda.launch import (
    Launch,
    empty,
    launch,
    multiprocessors,
    on_device,
)
from q2compile.runtime_kernels.layout import ceil_div, padded, scales_shape
from q2compile.runtime_kernels.schemes import E2M1_MAX, SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.transforms import FIXED_SIGN_SEED, Transform, get_transform

# Sources of rotate_quantize.cu: what x is; for codes their scheme's format, and SWIZZLED where its
# scales are.
SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, "nvfp4": 3, "mxfp4": 4}
SOURCES |= {"nvfp4" + SWIZZLED: 5, "mxfp4" + SWIZZLED: 6}
_FP32 = SOURCES[torch.float32]
_TILE = 128
_MOST_COINS = 1 << 34  # Philox blocks of four are counted in 32 bits
_STAGED = 16 * 256  # bytes of a warp (values.cuh)
_SCALES_PER_BLOCK = 256 * 8  # of a thread block of align_scales.cu
# The parameter structs, for Python's struct module.
_OUTPUT = "PPPPPPiiIi"
_ROTATE = f"PPP{_OUTPUT}{_OUTPUT}qiiiiiif"
_SIDE = "PPPPPqIi"
_ALIGN = f"{_SIDE}{_SIDE}Pf"
_NO_OUTPUT = (0,) * 10
_NO_SIDE = (0,) * 8

Quantized = tuple[torch.Tensor, ...]  # codes, scales, global scale, and a mask where there is one
Draw = tuple[torch.Tensor | None, int]  # of a direction: the seed of its signs and coins, a stream


class Rule(IntEnum):
    """Q2_RULE of rotate_quantize.cu."""

    MS_EDEN = 0
    POW2 = 1
    EXACT = 2
    MX = 3
    AMAX = 4

    @staticmethod
    def of(spec: Scheme) -> "Rule":
        if spec.rounding == "ms_eden":
            return Rule.MS_EDEN
        if spec.format == "mxfp4":
            return Rule.MX
        return Rule.EXACT if spec.global_scale == "exact" else Rule.POW2


_WORTHS = (Rule.MS_EDEN, Rule.POW2)  # whose scales align_scales.cu makes
_SCALES = (Rule.EXACT, Rule.MX)  # whose scales rotate_quantize.cu makes


@functools.cache
def not_served(scheme: str, transform: str, *, masked: bool = False) -> str | None:
    """None when rotate_quantize.cu has this scheme, otherwise the reason in words. masked: for the
    op with a trust mask."""
    spec = get_scheme(scheme)
    if spec.widened and spec.folds and Rule.of(spec) not in _WORTHS:
        return f"settle_values.cu folds global scales of nvfp4, not that of {scheme}"
    if spec.widened and Rule.of(spec) == Rule.MS_EDEN and not _settles(scheme, transform):
        return "values.cuh draws the coins of scales of chunks of 128 with a power of two alone"
    if spec.select is not None and spec.rounding != "rtn":
        return f"rotate_quantize.cu rounds 4/6 to nearest only, scheme {scheme} draws coins"
    if spec.masked and not masked:
        return f"scheme {scheme} wants a trust mask, which q2::quantize_masked alone writes"
    if spec.block[0] != 1:
        return f"rotate_quantize.cu has blocks of one row, scheme {scheme} has square ones"
    return None


def _settles(scheme: str, transform: str) -> bool:
    return get_scheme(scheme).global_scale == "pow2" and get_transform(transform).size == 128


def rotate_launch(
    source: int,
    rotation: Transform,
    spec: Scheme,
    rows: bool,
    cols: bool,
    *,
    vectors: bool = True,
    amax: bool = False,
    overlaps: bool = False,
) -> Launch:
    """rotate_quantize.cu for a source, a rotation, a scheme and the directions wanted.

    vectors: rows of x start on 16 bytes.  amax: no codes, the largest rotated number alone.
    overlaps: it follows AMAX on the same x (another kernel ahead of it might be writing x still).
    """
    rule = Rule.AMAX if amax else Rule.of(spec)
    rounds = rule not in (Rule.MS_EDEN, Rule.AMAX)
    stochastic = rounds and spec.rounding == "sr"
    # How far above the largest code a block's largest can come out, and what rounds that down.
    clips = rule == Rule.EXACT or (rule == Rule.POW2 and stochastic)
    clips = clips or (rule == Rule.MX and spec.shrink == 1.0)
    values = spec.widened and not amax
    threads, blocks_per_multiprocessor = _shape(spec, rows)
    tiles = _TILE * (threads // 2) * (4 if source == _FP32 else 2) * (1 if source == _FP32 else 2)
    return _rotate_launch(
        threads,
        tiles + values * threads // 32 * _STAGED,
        overlaps,
        Q2_THREADS=threads,
        Q2_BLOCKS_PER_SM=blocks_per_multiprocessor,
        Q2_SOURCE=source,
        Q2_SIZE=rotation.size,
        Q2_SIGNED=int(rotation.signs != "none"),
        Q2_ROWS=int(rows),
        Q2_COLS=int(cols),
        Q2_VECTORS=int(vectors),
        Q2_VALUES=int(values),
        Q2_RULE=int(rule),
        Q2_STOCHASTIC=int(stochastic),
        Q2_CLIPS=int(clips),
        Q2_HEADROOM=int(rounds and spec.vmax != E2M1_MAX),
        Q2_SHRINKS=int(rule == Rule.MX and spec.shrink != 1.0),
        Q2_SELECT={None: 0, "mse": 1, "mae": 2}[spec.select if rounds else None],
        Q2_SWIZZLED=int(spec.swizzled and rule in _SCALES),
        Q2_MASKED=int(spec.masked),
    )


@functools.cache
def _rotate_launch(threads: int, shared: int, overlaps: bool, **defines: int) -> Launch:
    file = "rotate_quantize.cu"
    layout = _ROTATE + "P" * defines["Q2_MASKED"]
    return launch(file, layout, threads, shared, overlaps=overlaps, defines=defines)


def align_launch(spec: Scheme, interleaved: bool) -> Launch:
    """align_scales.cu, or for numbers instead of codes settle_values.cu. interleaved: of chunks of
    128."""
    rule = Rule.of(spec)
    if spec.widened and rule in _WORTHS:
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
        Q2_SWIZZLED=int(spec.swizzled and rule in _WORTHS),
    )


@functools.cache
def _align_launch(**defines: int) -> Launch:
    layout = _ALIGN + "ii" * defines["Q2_SWIZZLED"]
    return launch("align_scales.cu", layout, threads=256, overlaps=True, defines=defines)


@functools.cache
def _settle_launch(**defines: int) -> Launch:
    return launch("settle_values.cu", _ALIGN, threads=256, overlaps=True, defines=defines)


def _shape(spec: Scheme, rows: bool) -> tuple[int, int]:
    """Threads of a thread block, and thread blocks on a multiprocessor at once.

    A thread holds 64 elements and needs 128 registers, which makes 512 threads on a multiprocessor;
    with coins beside them it needs more, and along columns alone fewer threads are as fast. A tile
    has half as many columns as a block has threads; along rows it must hold a chunk of 128.
    """
    if rows:
        return 256, 2
    return 128, 3 if spec.rounding == "sr" else 4


def launches(
    source: int,
    spec: Scheme,
    rotation: Transform,
    directions: tuple[bool, bool],
    *,
    vectors: bool,
    amax_known: bool,
) -> tuple[Launch, ...]:
    """What a call launches, in order."""
    rotate = functools.partial(rotate_launch, source, rotation, spec, *directions, vectors=vectors)
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


def align_end(spec: Scheme, *blocks: int) -> tuple[int, ...]:
    """What align_scales.cu's Params end with: the blocks in a row of both directions."""
    swizzles = spec.swizzled and Rule.of(spec) in _WORTHS
    return tuple(max(1, n) for n in blocks) if swizzles else ()


def align_grid(spec: Scheme, *sizes: tuple[int, int]) -> tuple[int, int]:
    """Thread blocks of align_scales.cu for the rows and the blocks in a row of each direction."""
    most = 0
    for rows, blocks in sizes:
        if spec.swizzled:  # eights of a row each, and all rows of the last tile
            rows, blocks = ceil_div(rows, 128) * 128, ceil_div(blocks, 8) * 8
        most = max(most, rows * blocks)
    return max(1, ceil_div(most, _SCALES_PER_BLOCK)), len(sizes)


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
) -> Plan:
    """For CUDA device `index`.

    extents: pitch, rows and columns of x, and for codes the scales a row of theirs and the
        logarithm of the rows that share one.
    directions: along rows, along columns.
    """
    _, m, k, *_ = extents
    threads, blocks_per_multiprocessor = _shape(spec, directions[0])
    rule = Rule.of(spec)
    # Swizzled scales of rotate_quantize.cu: so many that it comes by all of their last tile.
    whole = _TILE if spec.swizzled and rule in _SCALES else threads // 2
    across = max(1, ceil_div(k, whole)) * (whole // (threads // 2))
    tiles = ceil_div(m, _TILE) * across
    dtype = torch.float8_e8m0fnu if spec.format == "mxfp4" else torch.float8_e4m3fn
    sides = tuple(
        _Side(rows, width // 16, scales_shape(rows, width // spec.width, spec), dtype, spec.widened)
        if wanted
        else None
        for rows, width, wanted in (
            (m, padded(k, spec, rotation), directions[0]),
            (k, padded(m, spec, rotation), directions[1]),
        )
    )
    present = [side for side in sides if side]
    if spec.rounding == "sr" and any(16 * side.worths > _MOST_COINS for side in present):
        raise ValueError(
            f"{spec.name} of {m} x {k} numbers: the CUDA kernels draw coins for at most 2^34 "
            "numbers of one operand; quantise it in parts."
        )
    order = [*present, None][:2]
    worths = rule in _WORTHS
    sizes = [(side.rows, side.blocks) if worths else (0, 0) for side in present]
    made_by, of_sides = align_grid(spec, *sizes)
    if spec.widened:  # thread blocks of settle_values.cu stay for more, or mostly leave at once
        made_by = min(made_by, 2 * multiprocessors(index))
    # The kernel works on an nvfp4 source's code * scale * 2^-7.
    nvfp4 = source in (SOURCES["nvfp4"], SOURCES["nvfp4" + SWIZZLED])
    norm = rotation.norm * (128 if nvfp4 else 1)
    return Plan(
        index,
        launches(source, spec, rotation, directions, vectors=vectors, amax_known=amax_known),
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
    index: int, plan: Plan, operand: tuple[int, int, int], draws: tuple, amax: int
) -> list[Quantized]:
    sides = [(s, d) for s, d in zip(plan.sides, draws, strict=True) if s]
    parts = plan.parts
    # Of each side the largest, and with settle_values.cu the smallest.
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
        both = (*outputs[0], *_NO_OUTPUT) if plan.sides[0] else (*_NO_OUTPUT, *outputs[0])
        ends += _NO_SIDE
    else:
        both = (*outputs[0], *outputs[1])
    values = (*operand, *both, *plan.walk)
    if plan.masked:
        mask = empty((rows, 2 * blocks), (2 * blocks, 1), torch.uint8)
        results = [(*results[0], mask)]
        values += (mask.data_ptr(),)
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
) -> list[Quantized]:
    """The results of the directions that the plan has, rows first.

    operand: addresses of x, its scales, its global scale; 0 for what it has not.
    amax: address of the largest |x|, for an EXACT plan that knows it.
    """
    return _run(plan.device, plan, operand, (along_rows, along_cols), amax)


@functools.cache
def _fixed_seed(index: int) -> torch.Tensor:
    return torch.full((), FIXED_SIGN_SEED, dtype=torch.int64, device=torch.device("cuda", index))
