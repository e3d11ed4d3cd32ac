"""The rotating quantisers on CUDA: q2::rht_quantize, q2::rht_quantize_both, q2::requantize,
q2::requantize_by_scales; and q2::quantize for the schemes they have, which is the same without a
rotation.

Seeds stay on the device, so that a captured CUDA graph draws fresh coins at every replay.
"""

from collections.abc import Iterator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, aligned, launching
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.plan import (
    Direction,
    Groups,
    Summed,
    launches,
    quantizer_call,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    ROUNDED,
    ROUNDED_SWIZZLED,
    SOURCES,
    not_served,
    shared_memory,
)
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.argument_checks import check_operand, check_quantized
from q2compile.runtime_kernels.ops.quantize import checked as checked_without_rotation
from q2compile.runtime_kernels.ops.requantize_by_scales import checked_source
from q2compile.runtime_kernels.ops.rht_quantize import checked
from q2compile.runtime_kernels.registry import CUDA


def launched(
    x: torch.Tensor,
    scheme: str,
    transform: str,
    directions: tuple[bool, bool],
    *,
    amax_known: bool = False,
    grouped: bool = False,
    sums: bool = False,
) -> Iterator[Launch]:
    """What a call with the like of x, which may be fake, launches; for a pitch that is not known,
    whichever it may be."""
    known = statically_known_true
    if known(x.stride(1) != 1) and known(x.stride(0) == 1):
        directions = directions[::-1]
    pitch = x.stride(0) * x.element_size() % 16
    for vectors in (True, False):
        if not known(pitch != 0 if vectors else pitch == 0):
            yield from launches(
                SOURCES[x.dtype],
                get_scheme(scheme),
                get_transform(transform),
                directions,
                room=shared_memory(x.device.index),
                vectors=vectors,
                amax_known=amax_known,
                grouped=grouped,
                sums=sums,
            )


def launched_again(
    codes: torch.Tensor, source_scheme: str, scheme: str, transform: str, *, grouped: bool = False
) -> tuple[Launch, ...]:
    """The same for codes of a source."""
    return launches(
        source_of(get_scheme(source_scheme)),
        get_scheme(scheme),
        get_transform(transform),
        (False, True),
        room=shared_memory(codes.device.index),
        vectors=True,
        amax_known=False,
        grouped=grouped,
    )


def refuses(op: str, x: torch.Tensor, scheme: str, transform: str) -> str | None:
    """None when the kernels serve this scheme on x's device, otherwise the reason in words."""
    return not_served(scheme, transform) or refusal(op, CUDA, x.device.index, scheme)


@launching(
    "rht_quantize",
    refuses=lambda x, seed, scheme, transform, *rest: refuses("rht_quantize", x, scheme, transform),
    launches=lambda x, seed, scheme, transform, transpose, stream: launched(
        x, scheme, transform, (not transpose, transpose)
    ),
    forms={0: Form.LINES},
)
def rht_quantize(x, seed, scheme, transform, transpose, stream) -> Call:
    """See ops/rht_quantize.py."""
    check_operand("rht_quantize", x)
    checked("rht_quantize", seed, scheme, transform)
    operands = 1 + (seed is not None)
    along = Direction(At(1) if seed is not None else 0, stream, operands)
    return rotated(x, scheme, transform, (None, along) if transpose else (along, None), operands)


@launching(
    "rht_quantize_both",
    refuses=lambda x, row_seed, col_seed, scheme, transform, stream: refuses(
        "rht_quantize_both", x, scheme, transform
    ),
    launches=lambda x, row_seed, col_seed, scheme, transform, stream: launched(
        x, scheme, transform, (True, True)
    ),
    forms={0: Form.LINES},
)
def rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream) -> Call:
    """See ops/rht_quantize_both.py."""
    check_operand("rht_quantize_both", x)
    for seed in (row_seed, col_seed):
        checked("rht_quantize_both", seed, scheme, transform)
    directions, operands = both_directions(row_seed, col_seed, stream)
    return rotated(x, scheme, transform, directions, operands)


def both_directions(
    row_seed: torch.Tensor | None, col_seed: torch.Tensor | None, stream: int
) -> tuple[tuple[Direction, Direction], int]:
    """Of an op that is given x and these seeds; and how many tensors those are."""
    seeds = [seed for seed in (row_seed, col_seed) if seed is not None]
    operands = 1 + len(seeds)
    along_rows = Direction(At(1) if row_seed is not None else 0, stream, operands)
    along_cols = Direction(At(len(seeds)) if col_seed is not None else 0, stream, operands + 3)
    return (along_rows, along_cols), operands


@launching(
    "quantize",
    refuses=lambda x, amax, seed, scheme, stream: refuses("quantize", x, scheme, "none"),
    launches=lambda x, amax, seed, scheme, stream: launched(
        x, scheme, "none", (True, False), amax_known=amax is not None
    ),
    forms={0: Form.LINES},
)
def quantize(x, amax, seed, scheme, stream) -> Call:
    """See ops/quantize.py."""
    checked_without_rotation(x, amax, seed, scheme)
    operands = 1 + (amax is not None) + (seed is not None)
    along_rows = Direction(At(operands - 1) if seed is not None else 0, stream, operands)
    known = At(1) if amax is not None else 0
    return rotated(x, scheme, "none", (along_rows, None), operands, known)


def rotated(
    x: torch.Tensor,
    scheme: str,
    transform: str,
    directions: tuple[Direction | None, Direction | None],
    operands: int,
    amax: At | int = 0,
    groups: Groups | None = None,
    summed: Summed | None = None,
) -> Call:
    """x along its rows, its columns or both. A transposed matrix lies in rows the other way; with
    sums there is none."""
    if x.stride(1) != 1:
        assert summed is None
        x, directions = x.t(), directions[::-1]
    return quantizer_call(
        x.device.index,
        SOURCES[x.dtype],
        get_scheme(scheme),
        get_transform(transform),
        (x.stride(0), *x.shape, 0, 0),
        directions,
        operands,
        operand=(At(0), 0, 0),
        amax=amax,
        vectors=aligned(x) and x.stride(0) * x.element_size() % 16 == 0,
        groups=groups,
        summed=summed,
    )


def source_of(spec: Scheme) -> int:
    return SOURCES[spec.format + (SWIZZLED if spec.swizzled else "")]


def _refuses_again(op: str, x, source_scheme: str, scheme: str, transform: str) -> str | None:
    if get_scheme(source_scheme).swizzled and not get_scheme(scheme).swizzled:
        # Whose self-check has a source with swizzled scales, too.
        scheme = scheme.removesuffix(WIDENED) + SWIZZLED
    return refuses(op, x, scheme, transform)


@launching(
    "requantize",
    refuses=lambda codes, scales, global_scale, seed, source_scheme, scheme, transform, *rest: (
        _refuses_again("requantize", codes, source_scheme, scheme, transform)
    ),
    launches=lambda codes, scales, global_scale, seed, source_scheme, scheme, transform, *rest: (
        launched_again(codes, source_scheme, scheme, transform)
    ),
    forms={0: Form.CONTIGUOUS, 1: Form.CONTIGUOUS},
)
def requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream
) -> Call:
    """See ops/requantize.py. The source is dequantised on its way into shared memory."""
    check_quantized("requantize", codes, scales, global_scale)
    checked("requantize", seed, scheme, transform)
    operands = 3 + (seed is not None)
    along = Direction(At(3) if seed is not None else 0, stream, operands)
    return requantized(codes, source_scheme, scheme, transform, rows, along, operands)


def _refuses_by_scales(
    x, scales, global_scale, seed, source_scheme, scheme, transform, stream
) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"it rounds bf16 to given scales, not {x.dtype}"
    return _refuses_again("requantize_by_scales", x, source_scheme, scheme, transform)


def _launched_by_scales(
    x, scales, global_scale, seed, source_scheme, scheme, transform, stream
) -> Iterator[Launch]:
    """For a pitch that is not known, whichever it may be."""
    for vectors in (True, False):
        if not statically_known_true((x.shape[1] % 8 != 0) == vectors):
            yield from launches(
                _rounded(source_scheme),
                get_scheme(scheme),
                get_transform(transform),
                (False, True),
                room=shared_memory(x.device.index),
                vectors=vectors,
                amax_known=False,
            )


def _rounded(source_scheme: str) -> int:
    return ROUNDED_SWIZZLED if get_scheme(source_scheme).swizzled else ROUNDED


@launching(
    "requantize_by_scales",
    refuses=_refuses_by_scales,
    launches=_launched_by_scales,
    forms={0: Form.CONTIGUOUS, 1: Form.ALIGNED},
)
def requantize_by_scales(
    x, scales, global_scale, seed, source_scheme, scheme, transform, stream
) -> Call:
    """See ops/requantize_by_scales.py. x is rounded once it is in shared memory."""
    source = checked_source(x, scales, global_scale, source_scheme)
    checked("requantize_by_scales", seed, scheme, transform)
    operands = 3 + (seed is not None)
    along = Direction(At(3) if seed is not None else 0, stream, operands)
    return quantizer_call(
        x.device.index,
        _rounded(source_scheme),
        get_scheme(scheme),
        get_transform(transform),
        (x.stride(0), *x.shape, ceil_div(x.shape[1], source.width), 0),
        (None, along),
        operands,
        operand=(At(0), At(1), At(2)),
        vectors=aligned(x) and x.shape[1] % 8 == 0,
    )


def requantized(
    codes: torch.Tensor,
    source_scheme: str,
    scheme: str,
    transform: str,
    rows: int,
    along: Direction,
    operands: int,
    groups: Groups | None = None,
) -> Call:
    """Codes of a source along their columns. Scales and global scale are the next two operands."""
    source, (height, half) = get_scheme(source_scheme), codes.shape
    shift = source.block[0].bit_length() - 1  # blocks of 1 or 16 rows
    return quantizer_call(
        codes.device.index,
        source_of(source),
        get_scheme(scheme),
        get_transform(transform),
        (half, height, rows, 2 * half // source.width, shift),
        (None, along),
        operands,
        operand=(At(0), At(1), At(2)),
        groups=groups,
    )
