"""The quantisers of rows in groups on CUDA: q2::rht_quantize_groups, q2::rht_quantize_groups_both,
q2::requantize_groups. They are rotate_quantize.cu with Q2_GROUPED, in the calls of plan.py.

The ends of the groups stay on the device, and the padded layout exists nowhere: a thread block
looks up which rows a tile of it holds, and reads those.
"""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, aligned, launching
from q2compile.runtime_kernels.cuda.quantize.plan import (
    Direction,
    Groups,
    launches,
    quantizer_call,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    not_served,
    shared_memory,
)
from q2compile.runtime_kernels.cuda.quantize.rotating_ops import source_of
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AT_ONCE, Rule
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.argument_checks import (
    check_groups,
    check_operand,
    check_quantized,
)
from q2compile.runtime_kernels.ops.rht_quantize import checked
from q2compile.runtime_kernels.registry import CUDA

_COLUMNS, _BOTH = (False, True), (True, True)
_FORMS = {0: Form.ROWS, 1: Form.CONTIGUOUS, 2: Form.CONTIGUOUS}


def _refuses(op: str, device: torch.device, scheme: str, transform: str) -> str | None:
    spec = get_scheme(scheme)
    if spec.swizzled and Rule.of(spec) in SCALED_AT_ONCE:
        return "rotate_quantize.cu leaves the last tile of swizzled scales to rows, not to groups"
    return not_served(scheme, transform) or refusal(op, CUDA, device.index, scheme)


def _prepare(x, scheme: str, transform: str, directions: tuple[bool, bool]) -> None:
    """Loads what a call with the like of x, which may be fake, will launch."""
    rows_of_its_own = statically_known_true(x.stride(1) == 1)  # else they are copied
    pitch = (x.stride(0) if rows_of_its_own else x.shape[1]) * x.element_size() % 16
    for vectors in (True, False):
        if not statically_known_true(pitch != 0 if vectors else pitch == 0):
            for launch in launches(
                *(SOURCES[x.dtype], get_scheme(scheme), get_transform(transform), directions),
                room=shared_memory(x.device.index),
                vectors=vectors,
                amax_known=False,
                grouped=True,
            ):
                launch.warm_up(x.device.index)


@launching(
    "rht_quantize_groups",
    refuses=lambda x, offs, padded_offs, seed, scheme, transform, stream: _refuses(
        "rht_quantize_groups", x.device, scheme, transform
    ),
    prepare=lambda x, offs, padded_offs, seed, scheme, transform, stream: _prepare(
        x, scheme, transform, _COLUMNS
    ),
    forms=_FORMS,
)
def rht_quantize_groups(x, offs, padded_offs, seed, scheme, transform, stream) -> Call:
    """See ops/rht_quantize_groups.py."""
    op, seeds = "rht_quantize_groups", [seed]
    return _rotated(op, x, offs, padded_offs, seeds, scheme, transform, stream)


@launching(
    "rht_quantize_groups_both",
    refuses=lambda x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream: _refuses(
        "rht_quantize_groups_both", x.device, scheme, transform
    ),
    prepare=lambda x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream: _prepare(
        x, scheme, transform, _BOTH
    ),
    forms=_FORMS,
)
def rht_quantize_groups_both(
    x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream
) -> Call:
    """See ops/rht_quantize_groups_both.py."""
    op, seeds = "rht_quantize_groups_both", [row_seed, col_seed]
    return _rotated(op, x, offs, padded_offs, seeds, scheme, transform, stream)


def _rotated(
    op: str,
    x: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    seeds: list[torch.Tensor | None],
    scheme: str,
    transform: str,
    stream: int,
) -> Call:
    """x along its columns by groups, and along its rows where there are two seeds."""
    check_operand(op, x)
    check_groups(op, offs, padded_offs)
    operands, places = 3, []
    for seed in seeds:
        checked(op, seed, scheme, transform)
        places.append(At(operands) if seed is not None else 0)
        operands += seed is not None
    along = [Direction(at, stream, operands + 3 * i) for i, at in enumerate(places)]
    return quantizer_call(
        x.device.index,
        SOURCES[x.dtype],
        get_scheme(scheme),
        get_transform(transform),
        (x.stride(0), *x.shape, 0, 0),
        (along[0] if len(along) == 2 else None, along[-1]),
        operands,
        operand=(At(0), 0, 0),
        vectors=aligned(x) and x.stride(0) * x.element_size() % 16 == 0,
        groups=Groups(At(1), At(2), offs.shape[0]),
    )


def _prepare_requantize(
    codes,
    scales,
    global_scale,
    offs,
    padded_offs,
    seed,
    source_scheme,
    scheme,
    transform,
    rows,
    stream,
) -> None:
    source = source_of(get_scheme(source_scheme))
    spec, rotation = get_scheme(scheme), get_transform(transform)
    for launch in launches(
        *(source, spec, rotation, _COLUMNS),
        room=shared_memory(codes.device.index),
        vectors=True,
        amax_known=False,
        grouped=True,
    ):
        launch.warm_up(codes.device.index)


@launching(
    "requantize_groups",
    refuses=lambda codes, *rest: _refuses("requantize_groups", codes.device, rest[6], rest[7]),
    prepare=_prepare_requantize,
    forms=dict.fromkeys((0, 1, 3, 4), Form.CONTIGUOUS),
)
def requantize_groups(
    codes,
    scales,
    global_scale,
    offs,
    padded_offs,
    seed,
    source_scheme,
    scheme,
    transform,
    rows,
    stream,
) -> Call:
    """See ops/requantize_groups.py."""
    check_quantized("requantize_groups", codes, scales, global_scale)
    check_groups("requantize_groups", offs, padded_offs)
    spec, rotation = checked("requantize_groups", seed, scheme, transform)
    source, (height, half) = get_scheme(source_scheme), codes.shape
    shift = source.block[0].bit_length() - 1  # blocks of 1 or 16 rows
    operands = 5 + (seed is not None)
    return quantizer_call(
        codes.device.index,
        source_of(source),
        spec,
        rotation,
        (half, height, rows, 2 * half // source.width, shift),
        (None, Direction(At(5) if seed is not None else 0, stream, operands)),
        operands,
        operand=(At(0), At(1), At(2)),
        groups=Groups(At(3), At(4), offs.shape[0]),
    )
