"""Rotation and MS-EDEN on CUDA: q2::rht_quantize, q2::rht_quantize_both, q2::requantize.

Two launches each: rotate_quantize.cu makes the codes and what each is worth, align_scales.cu turns
that into e4m3 scales and a global scale. Seeds stay on the device, so that a captured CUDA graph
draws fresh coins at every replay.
"""

import functools
import math

import torch

from q2compile.runtime_kernels.checks import check_operand, check_quantized
from q2compile.runtime_kernels.cuda.launch import Launch, launch, multiprocessors
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.layout import ceil_div, empty_quantized
from q2compile.runtime_kernels.registry import kernel
from q2compile.runtime_kernels.rht_quantize.op import checked
from q2compile.runtime_kernels.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.transforms import FIXED_SIGN_SEED, Transform, get_transform

NAME = "cuda"

# Sources of rotate_quantize.cu and the bytes of an element in shared memory.
_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_NVFP4 = 3
_ELEMENT_BYTES = (2, 2, 4, 2)
_STAGES = (2, 2, 1, 1)
_TILE = 128
_OUTPUT = "PPPPii"
_ROTATE = f"PP{_OUTPUT}{_OUTPUT}qiiiiii"
_SIDE = "PPPPPqIi"
_ALIGN = f"{_SIDE}{_SIDE}Pf"
_NO_OUTPUT = (0, 0, 0, 0, 0, 0)
_NO_SIDE = (0, 0, 0, 0, 0, 0, 0, 0)


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
        Q2_THREADS=threads,
        Q2_SOURCE=source,
        Q2_SIZE=size,
        Q2_SIGNED=int(signed),
        Q2_ROWS=int(rows),
        Q2_COLS=int(cols),
        Q2_VECTORS=int(vectors),
        Q2_BLOCKS_PER_SM=blocks_per_multiprocessor,
    )


@functools.cache
def align_launch(pow2: bool) -> Launch:
    """Phase 2."""
    return launch("align_scales.cu", _ALIGN, threads=256, Q2_POW2=int(pow2))


def _shape(rows: bool, cols: bool) -> tuple[int, int]:
    """Threads of a thread block, and thread blocks on a multiprocessor at once.

    Along columns a thread holds 64 elements and needs 128 registers, along rows 32, and 80. A tile
    has half as many columns as a block has threads; along rows it must hold a chunk of 128.
    """
    if not cols:
        return 256, 3
    return (256, 2) if rows else (128, 4)


class _Side:
    """Results of one direction, and the workspace between the phases.

    seed: of the coins.  sign_seed: of the rotation's signs (the same, or the fixed one).
    """

    def __init__(
        self,
        x,
        rows: int,
        contraction: int,
        spec: Scheme,
        rotation: Transform,
        seed,
        stream: int,
        parts: int,
    ):
        self.result = empty_quantized(x, rows, contraction, spec, rotation)
        codes, scales, _ = self.result
        self.rows, self.blocks = scales.shape
        self.count = self.rows * self.blocks
        # worth (fp32) and, behind it, the largest of each thread block
        self.workspace = torch.empty(self.count + parts, dtype=torch.float32, device=codes.device)
        self.worth = self.workspace.data_ptr()
        self.largest = self.worth + 4 * self.count
        self.parts, self.stream, self.seed = parts, stream, seed
        self.sign_seed = _fixed_seed(codes.device) if rotation.signs == "fixed" else seed

    def for_rotate(self) -> tuple:
        sign_seed = self.sign_seed.data_ptr()
        return (
            self.result[0].data_ptr(),
            self.worth,
            self.largest,
            sign_seed,
            self.rows,
            self.blocks,
        )

    def for_align(self) -> tuple:
        _, scales, global_scale = self.result
        return (
            self.worth,
            self.largest,
            self.seed.data_ptr(),
            scales.data_ptr(),
            global_scale.data_ptr(),
            self.count,
            self.stream,
            self.parts,
        )


def refuses(op: str, x: torch.Tensor, scheme: str, transform: str) -> str | None:
    """None when the kernels serve this scheme on x's device, otherwise the reason in words."""
    spec = get_scheme(scheme)
    get_transform(transform)
    if spec.rounding != "ms_eden":
        return (
            f"scheme {scheme} does not round by MS-EDEN, which is all that rotate_quantize.cu does"
        )
    return refusal(op, NAME, x.device.index)


@kernel(
    "rht_quantize",
    NAME,
    device_type="cuda",
    refuses=lambda x, seed, scheme, transform, transpose, stream: refuses(
        "rht_quantize", x, scheme, transform
    ),
)
def rht_quantize(x, seed, scheme, transform, transpose, stream):
    """See rht_quantize/op.py."""
    check_operand("rht_quantize", x)
    spec, rotation = checked("rht_quantize", seed, scheme, transform)
    along_rows, along_cols = (seed, stream), None
    if transpose:
        along_rows, along_cols = along_cols, along_rows
    return _rotate(x, spec, rotation, along_rows, along_cols)[0]


@kernel(
    "rht_quantize_both",
    NAME,
    device_type="cuda",
    refuses=lambda x, row_seed, col_seed, scheme, transform, stream: refuses(
        "rht_quantize_both", x, scheme, transform
    ),
)
def rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream):
    """See rht_quantize_both/op.py."""
    check_operand("rht_quantize_both", x)
    for seed in (row_seed, col_seed):
        spec, rotation = checked("rht_quantize_both", seed, scheme, transform)
    rows, cols = _rotate(x, spec, rotation, (row_seed, stream), (col_seed, stream))
    return (*rows, *cols)


def _rotate(
    x: torch.Tensor, spec: Scheme, rotation: Transform, along_rows, along_cols
) -> list[tuple]:
    """Phases 1 and 2 of x along its rows, its columns or both: the results of those asked for, in
    this order.

    along_rows, along_cols: None, or (seed, stream).
    """
    if x.stride(1) != 1 and x.stride(0) == 1:  # a transposed matrix lies in rows the other way
        return _rotate(x.t(), spec, rotation, along_cols, along_rows)[::-1]
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, cols = x.shape
    pitch, address, element = x.stride(0), x.data_ptr(), x.element_size()
    vectors = address % 16 == 0 and pitch * element % 16 == 0
    directions = (along_rows is not None, along_cols is not None)
    tiles, tiles_across, parts = _grid(x.device, rows, cols, *directions)
    sides = [
        _Side(x, m, k, spec, rotation, *seeded, parts) if seeded else None
        for m, k, seeded in ((rows, cols, along_rows), (cols, rows, along_cols))
    ]
    rotate_launch(
        _SOURCES[x.dtype],
        rotation.size,
        rotation.signs != "none",
        *directions,
        vectors,
    )(
        x.device,
        (parts, 1),
        address,
        0,
        *(sides[0].for_rotate() if sides[0] else _NO_OUTPUT),
        *(sides[1].for_rotate() if sides[1] else _NO_OUTPUT),
        pitch,
        rows,
        cols,
        0,
        0,
        tiles,
        tiles_across,
    )
    wanted = [side for side in sides if side]
    _align(wanted, spec, 0, 1 / math.sqrt(rotation.size))
    return [side.result for side in wanted]


@kernel(
    "requantize",
    NAME,
    device_type="cuda",
    refuses=lambda codes, scales, global_scale, seed, source_scheme, scheme, transform, *rest: (
        _refuses_source(codes, source_scheme, scheme, transform)
    ),
)
def requantize(codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream):
    """See requantize/op.py. The source is dequantised in registers."""
    check_quantized("requantize", codes, scales, global_scale)
    spec, rotation = checked("requantize", seed, scheme, transform)
    source = get_scheme(source_scheme)
    codes, scales = codes.contiguous(), scales.contiguous()
    tiles, tiles_across, parts = _grid(codes.device, codes.shape[0], rows, False, True)
    side = _Side(codes, rows, codes.shape[0], spec, rotation, seed, stream, parts)
    rotate_launch(_NVFP4, rotation.size, rotation.signs != "none", False, True, True)(
        codes.device,
        (parts, 1),
        codes.data_ptr(),
        scales.data_ptr(),
        *_NO_OUTPUT,
        *side.for_rotate(),
        codes.shape[1],
        codes.shape[0],
        rows,
        scales.shape[1],
        4 if source.block[0] == 16 else 0,
        tiles,
        tiles_across,
    )
    # The kernel works on code * scale * 2^-7, and leaves the source's global scale to phase 2.
    _align([side], spec, global_scale.data_ptr(), 128 / math.sqrt(rotation.size))
    return side.result


def _refuses_source(
    codes: torch.Tensor, source_scheme: str, scheme: str, transform: str
) -> str | None:
    if get_scheme(source_scheme).format != "nvfp4":
        return f"the source scheme {source_scheme} is not nvfp4"
    return refuses("requantize", codes, scheme, transform)


def _align(sides: list[_Side], spec: Scheme, source_global: int, norm: float) -> None:
    device = sides[0].result[0].device
    fields = [side.for_align() for side in sides] + [_NO_SIDE] * (2 - len(sides))
    quads = ceil_div(max(side.count for side in sides), 4 * 256)
    # No more thread blocks than fit at once: each begins by reducing `largest`.
    grid = max(1, min(quads, 8 * multiprocessors(device.index)))
    align_launch(spec.global_scale == "pow2")(
        device, (grid, len(sides)), *fields[0], *fields[1], source_global, norm
    )


def _grid(device: torch.device, m: int, k: int, rows: bool, cols: bool) -> tuple[int, int, int]:
    """Tiles of a matrix [m, k], tiles from left to right, and thread blocks that walk over them."""
    threads, blocks_per_multiprocessor = _shape(rows, cols)
    across = max(1, ceil_div(k, threads // 2))
    tiles = ceil_div(m, _TILE) * across
    blocks = blocks_per_multiprocessor * multiprocessors(device.index)
    return tiles, across, max(1, min(tiles, blocks))


@functools.cache
def _fixed_seed(device: torch.device) -> torch.Tensor:
    return torch.full((), FIXED_SIGN_SEED, dtype=torch.int64, device=device)
