"""Rotation and MS-EDEN on CUDA: q2::rht_quantize, q2::rht_quantize_both, q2::requantize.

Two launches each: rotate_quantize.cu makes the codes and what each is worth, align_scales.cu turns
that into e4m3 scales and a global scale. Seeds stay on the device, so that a captured CUDA graph
draws fresh coins at every replay.
"""

import functools
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.checks import check_operand, check_quantized
from q2compile.runtime_kernels.cuda.launch import Launch, launch, multiprocessors
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.layout import ceil_div, padded
from q2compile.runtime_kernels.registry import kernel
from q2compile.runtime_kernels.rht_quantize.op import checked
from q2compile.runtime_kernels.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.transforms import FIXED_SIGN_SEED, Transform, get_transform

NAME = "cuda"

# Sources of rotate_quantize.cu: bytes of an element in shared memory, tiles held there.
_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_NVFP4 = 3
_ELEMENT_BYTES = (2, 2, 4, 2)
_STAGES = (2, 2, 1, 1)
_TILE = 128
_SCALES_PER_BLOCK = 256 * 8  # of a thread block of phase 2
# The parameter structs, for Python's struct module.
_OUTPUT = "PPPPii"
_ROTATE = f"PP{_OUTPUT}{_OUTPUT}qiiiiii"
_SIDE = "PPPPPqIi"
_ALIGN = f"{_SIDE}{_SIDE}Pf"
_NO_OUTPUT = (0,) * 6
_NO_SIDE = (0,) * 8

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Draw = tuple[torch.Tensor, int]  # seed and stream of a direction's coins; its signs use the seed


@functools.cache
def rotate_launch(
    source: int, size: int, signed: bool, rows: bool, cols: bool, vectors: bool
) -> Launch:
    """Phase 1 for a source, a rotation, and the directions wanted."""
    threads, blocks_per_multiprocessor = _shape(rows, cols)
    return launch(
        "rotate_quantize.cu",
        _ROTATE,
        threads,
        shared=_TILE * (threads // 2) * _ELEMENT_BYTES[source] * _STAGES[source],
        defines={
            "Q2_THREADS": threads,
            "Q2_SOURCE": source,
            "Q2_SIZE": size,
            "Q2_SIGNED": int(signed),
            "Q2_ROWS": int(rows),
            "Q2_COLS": int(cols),
            "Q2_VECTORS": int(vectors),
            "Q2_BLOCKS_PER_SM": blocks_per_multiprocessor,
        },
    )


@functools.cache
def align_launch(pow2: bool, interleaved: bool) -> Launch:
    """Phase 2. interleaved: of chunks of 128."""
    return launch(
        "align_scales.cu",
        _ALIGN,
        threads=256,
        overlaps=True,
        defines={"Q2_POW2": int(pow2), "Q2_INTERLEAVED": int(interleaved)},
    )


def _shape(rows: bool, cols: bool) -> tuple[int, int]:
    """Threads of a thread block, and thread blocks on a multiprocessor at once.

    A thread holds 64 elements and needs 128 registers, which makes 512 threads on a multiprocessor.
    A tile has half as many columns as a block has threads; along rows it must hold a chunk of 128.
    """
    return (256, 2) if rows else (128, 4)


def refuses(op: str, x: torch.Tensor, scheme: str) -> str | None:
    """None when the kernels serve this scheme on x's device, otherwise the reason in words."""
    if get_scheme(scheme).rounding != "ms_eden":
        return f"rotate_quantize.cu rounds by MS-EDEN, scheme {scheme} does not"
    return refusal(op, NAME, x.device.index)


@kernel(
    "rht_quantize",
    NAME,
    device_type="cuda",
    refuses=lambda x, seed, scheme, *rest: refuses("rht_quantize", x, scheme),
)
def rht_quantize(x, seed, scheme, transform, transpose, stream) -> Quantized:
    """See rht_quantize/op.py."""
    check_operand("rht_quantize", x)
    spec, rotation = checked("rht_quantize", seed, scheme, transform)
    draw = (seed, stream)
    (result,) = _rotate(x, spec, rotation, None if transpose else draw, draw if transpose else None)
    return result


@kernel(
    "rht_quantize_both",
    NAME,
    device_type="cuda",
    refuses=lambda x, row_seed, col_seed, scheme, *rest: refuses("rht_quantize_both", x, scheme),
)
def rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream):
    """See rht_quantize_both/op.py."""
    check_operand("rht_quantize_both", x)
    for seed in (row_seed, col_seed):
        spec, rotation = checked("rht_quantize_both", seed, scheme, transform)
    along_rows, along_cols = _rotate(x, spec, rotation, (row_seed, stream), (col_seed, stream))
    return (*along_rows, *along_cols)


def _rotate(
    x: torch.Tensor,
    spec: Scheme,
    rotation: Transform,
    along_rows: Draw | None,
    along_cols: Draw | None,
) -> list[Quantized]:
    """x along its rows, its columns or both: the results of those asked for, in this order."""
    if x.stride(1) != 1 and x.stride(0) == 1:  # a transposed matrix lies in rows the other way
        return _rotate(x.t(), spec, rotation, along_cols, along_rows)[::-1]
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, cols = x.shape
    pitch, address = x.stride(0), x.data_ptr()
    vectors = (address | pitch * x.element_size()) % 16 == 0
    directions = (along_rows is not None, along_cols is not None)
    source = _SOURCES[x.dtype]
    plan = _plan(x.device.index, source, rows, cols, vectors, spec.name, rotation.name, *directions)
    return _run(plan, x.device, (address, 0), (pitch, rows, cols, 0, 0), along_rows, along_cols, 0)


def _refuses_source(codes, scales, global_scale, seed, source_scheme, scheme, *rest) -> str | None:
    if get_scheme(source_scheme).format != "nvfp4":
        return f"rotate_quantize.cu reads nvfp4, the source scheme {source_scheme} is not"
    return refuses("requantize", codes, scheme)


@kernel("requantize", NAME, device_type="cuda", refuses=_refuses_source)
def requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream
) -> Quantized:
    """See requantize/op.py. The source is dequantised on its way into shared memory."""
    check_quantized("requantize", codes, scales, global_scale)
    spec, rotation = checked("requantize", seed, scheme, transform)
    codes, scales = codes.contiguous(), scales.contiguous()
    m, half = codes.shape
    plan = _plan(codes.device.index, _NVFP4, m, rows, True, scheme, transform, False, True)
    shift = 4 if get_scheme(source_scheme).block[0] == 16 else 0
    (result,) = _run(
        plan,
        codes.device,
        (codes.data_ptr(), scales.data_ptr()),
        (half, m, rows, scales.shape[1], shift),
        None,
        (seed, stream),
        global_scale.data_ptr(),
    )
    return result


class _Side(NamedTuple):
    """Shapes of one direction's results."""

    rows: int
    blocks: int  # of 16, a row

    @property
    def scales(self) -> int:
        """How many, of all rows."""
        return self.rows * self.blocks

    @property
    def room(self) -> int:
        """Numbers in the workspace between the phases: the next side begins on 16 bytes."""
        return ceil_div(self.scales, 4) * 4


class _Plan(NamedTuple):
    """All of a call that follows from shapes, kept for the next call like it."""

    rotate: Launch
    align: Launch
    tiles: int
    tiles_across: int
    parts: int  # thread blocks of phase 1, each of which leaves the largest of its results
    largest_at: int  # numbers in the workspace before those
    workspace: int  # numbers in all
    align_grid: tuple[int, int]
    sides: tuple[_Side | None, _Side | None]
    norm: float
    fixed_signs: bool


@functools.lru_cache(maxsize=1024)
def _plan(
    index: int,
    source: int,
    m: int,
    k: int,
    vectors: bool,
    scheme: str,
    transform: str,
    along_rows: bool,
    along_cols: bool,
) -> _Plan:
    spec, rotation = get_scheme(scheme), get_transform(transform)
    threads, blocks_per_multiprocessor = _shape(along_rows, along_cols)
    across = max(1, ceil_div(k, threads // 2))
    tiles = ceil_div(m, _TILE) * across
    sides = (
        _Side(m, padded(k, spec, rotation) // spec.width) if along_rows else None,
        _Side(k, padded(m, spec, rotation) // spec.width) if along_cols else None,
    )
    present = [side for side in sides if side]
    room = sum(side.room for side in present)
    parts = max(1, min(tiles, blocks_per_multiprocessor * multiprocessors(index)))
    signed = rotation.signs != "none"
    return _Plan(
        rotate_launch(source, rotation.size, signed, along_rows, along_cols, vectors),
        align_launch(spec.global_scale == "pow2", rotation.size == 128),
        tiles,
        across,
        parts,
        room,
        room + parts * len(present),
        (max(1, ceil_div(max(s.scales for s in present), _SCALES_PER_BLOCK)), len(present)),
        sides,
        # The kernel works on an nvfp4 source's code * scale * 2^-7.
        rotation.norm * (128 if source == _NVFP4 else 1),
        rotation.signs == "fixed",
    )


def _run(
    plan: _Plan,
    device: torch.device,
    operands: tuple[int, int],
    extents: tuple[int, int, int, int, int],
    along_rows: Draw | None,
    along_cols: Draw | None,
    source_global: int,
) -> list[Quantized]:
    """Both phases.

    operands, extents: the fields of rotate_quantize.cu's Params before and after its outputs.
    source_global: address of the source's global scale, or 0.
    """
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=device)
    worth = workspace.data_ptr()
    largest = worth + 4 * plan.largest_at
    outputs: list[int] = []
    ends: list[int] = []
    results: list[Quantized] = []
    for side, draw in zip(plan.sides, (along_rows, along_cols), strict=True):
        if side is None or draw is None:
            outputs += _NO_OUTPUT
            continue
        seed, stream = draw
        codes = torch.empty((side.rows, side.blocks * 8), dtype=torch.uint8, device=device)
        scales = torch.empty((side.rows, side.blocks), dtype=torch.float8_e4m3fn, device=device)
        global_scale = torch.empty((), dtype=torch.float32, device=device)
        results.append((codes, scales, global_scale))
        seed_at = seed.data_ptr()
        signs_at = _fixed_seed(device).data_ptr() if plan.fixed_signs else seed_at
        outputs += (codes.data_ptr(), worth, largest, signs_at, side.rows, side.blocks)
        ends += (worth, largest, seed_at, scales.data_ptr(), global_scale.data_ptr())
        ends += (side.scales, stream, plan.parts)
        worth, largest = worth + 4 * side.room, largest + 4 * plan.parts
    if len(results) == 1:
        ends += _NO_SIDE
    walk = (plan.tiles, plan.tiles_across)
    plan.rotate(device, (plan.parts, 1), *operands, *outputs, *extents, *walk)
    plan.align(device, plan.align_grid, *ends, source_global, plan.norm)
    return results


@functools.cache
def _fixed_seed(device: torch.device) -> torch.Tensor:
    return torch.full((), FIXED_SIGN_SEED, dtype=torch.int64, device=device)
