"""The quantisers of rows in groups on CUDA: q2::rht_quantize_groups, q2::rht_quantize_groups_both,
q2::requantize_groups. They are rotate_quantize.cu with Q2_GROUPED, in the calls of plan.py.

The ends of the groups stay on the device, and the padded layout exists nowhere: a thread block
looks up which rows a tile of it holds, and reads those.
"""

from collections.abc import Iterator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, launching
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.plan import Direction, Groups
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.cuda.quantize.rotating_ops import (
    launched,
    launched_again,
    requantized,
    rotated,
)
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AT_ONCE, Rule
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.schemes import get_scheme
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


def _launched(x, scheme: str, transform: str, directions: tuple[bool, bool]) -> Iterator[Launch]:
    """What a call with the like of x, which may be fake, launches."""
    in_rows = statically_known_true(x.stride(1) == 1)  # else it is copied
    return launched(x if in_rows else x.contiguous(), scheme, transform, directions, grouped=True)


@launching(
    "rht_quantize_groups",
    refuses=lambda x, offs, padded_offs, seed, scheme, transform, stream: _refuses(
        "rht_quantize_groups", x.device, scheme, transform
    ),
    launches=lambda x, offs, padded_offs, seed, scheme, transform, stream: _launched(
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
    launches=lambda x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream: _launched(
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
    directions = along[0] if len(along) == 2 else None, along[-1]
    groups = Groups(At(1), At(2), offs.shape[0])
    return rotated(x, scheme, transform, directions, operands, groups=groups)


@launching(
    "requantize_groups",
    refuses=lambda codes, *rest: _refuses("requantize_groups", codes.device, rest[6], rest[7]),
    launches=lambda codes, *rest: launched_again(codes, *rest[5:8], grouped=True),
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
    checked("requantize_groups", seed, scheme, transform)
    operands = 5 + (seed is not None)
    along = Direction(At(5) if seed is not None else 0, stream, operands)
    groups = Groups(At(3), At(4), offs.shape[0])
    return requantized(codes, source_scheme, scheme, transform, rows, along, operands, groups)
