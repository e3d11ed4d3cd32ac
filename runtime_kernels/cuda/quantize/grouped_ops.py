"""The quantisers of rows in groups on CUDA: q2::rht_quantize_groups, q2::rht_quantize_groups_both,
q2::requantize_groups. They are rotate_quantize.cu with Q2_GROUPED, in the plans of rotating_ops.py.

The ends of the groups stay on the device, and the padded layout exists nowhere: a thread block
looks up which rows a tile of it holds, and reads those.
"""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.quantize.plan import Plan, Quantized, launches, make_plan, run
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, not_served
from q2compile.runtime_kernels.cuda.quantize.rotating_ops import kind_of, planned, source_of
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
from q2compile.runtime_kernels.registry import CUDA, kernel

_COLUMNS, _BOTH = (False, True), (True, True)


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
                vectors=vectors,
                amax_known=False,
                grouped=True,
            ):
                launch.warm_up(x.device.index)


@kernel(
    "rht_quantize_groups",
    CUDA,
    device_type="cuda",
    refuses=lambda x, offs, padded_offs, seed, scheme, transform, stream: _refuses(
        "rht_quantize_groups", x.device, scheme, transform
    ),
    prepare=lambda x, offs, padded_offs, seed, scheme, transform, stream: _prepare(
        x, scheme, transform, _COLUMNS
    ),
)
def rht_quantize_groups(x, offs, padded_offs, seed, scheme, transform, stream) -> Quantized:
    """See ops/rht_quantize_groups.py."""
    draws = (None, (seed, stream))
    return _rotated("rht_quantize_groups", x, offs, padded_offs, scheme, transform, draws)[0]


@kernel(
    "rht_quantize_groups_both",
    CUDA,
    device_type="cuda",
    refuses=lambda x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream: _refuses(
        "rht_quantize_groups_both", x.device, scheme, transform
    ),
    prepare=lambda x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream: _prepare(
        x, scheme, transform, _BOTH
    ),
)
def rht_quantize_groups_both(
    x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream
) -> tuple[torch.Tensor, ...]:
    """See ops/rht_quantize_groups_both.py."""
    draws = ((row_seed, stream), (col_seed, stream))
    op = "rht_quantize_groups_both"
    along_rows, along_cols = _rotated(op, x, offs, padded_offs, scheme, transform, draws)
    return (*along_rows, *along_cols)


def _rotated(
    op: str,
    x: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    scheme: str,
    transform: str,
    draws: tuple,
) -> list[Quantized]:
    """x along its rows where that is asked for, and along its columns."""
    if x.dim() == 2 and x.stride(1) != 1:
        x = x.contiguous()
    offs, padded_offs = offs.contiguous(), padded_offs.contiguous()
    index, shape, strides, address = x.device.index, x.shape, x.stride(), x.data_ptr()
    aligned = address % 16 == 0
    ends = (offs.shape, offs.dtype, padded_offs.shape, padded_offs.dtype)
    kinds = tuple(draw and kind_of(draw[0]) for draw in draws)
    key = (op, index, x.dtype, shape, strides, aligned, ends, scheme, transform, kinds)

    def make() -> Plan:
        check_operand(op, x)
        check_groups(op, offs, padded_offs)
        for draw in draws:
            if draw is not None:
                checked(op, draw[0], scheme, transform)
        return make_plan(
            index,
            SOURCES[x.dtype],
            get_scheme(scheme),
            get_transform(transform),
            (strides[0], *shape, 0, 0),
            (draws[0] is not None, True),
            vectors=aligned and strides[0] * x.element_size() % 16 == 0,
            groups=offs.shape[0],
        )

    last = (offs.data_ptr(), padded_offs.data_ptr(), offs.shape[0])
    return run(planned(key, make), (address, 0, 0), draws[0], draws[1], last=last)


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
        *(source, spec, rotation, _COLUMNS), vectors=True, amax_known=False, grouped=True
    ):
        launch.warm_up(codes.device.index)


@kernel(
    "requantize_groups",
    CUDA,
    device_type="cuda",
    refuses=lambda codes, *rest: _refuses("requantize_groups", codes.device, rest[6], rest[7]),
    prepare=_prepare_requantize,
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
) -> Quantized:
    """See ops/requantize_groups.py."""
    codes, scales = codes.contiguous(), scales.contiguous()
    offs, padded_offs = offs.contiguous(), padded_offs.contiguous()
    index, shape = codes.device.index, codes.shape
    operands = (codes.dtype, shape, scales.dtype, scales.shape, kind_of(global_scale))
    ends = (offs.shape, offs.dtype, padded_offs.shape, padded_offs.dtype)
    key = (index, operands, ends, kind_of(seed), source_scheme, scheme, transform, rows)

    def make() -> Plan:
        check_quantized("requantize_groups", codes, scales, global_scale)
        check_groups("requantize_groups", offs, padded_offs)
        spec, rotation = checked("requantize_groups", seed, scheme, transform)
        source = get_scheme(source_scheme)
        shift = source.block[0].bit_length() - 1  # blocks of 1 or 16 rows
        extents = (shape[1], shape[0], rows, 2 * shape[1] // source.width, shift)
        return make_plan(
            *(index, source_of(source), spec, rotation, extents, _COLUMNS), groups=offs.shape[0]
        )

    operand = (codes.data_ptr(), scales.data_ptr(), global_scale.data_ptr())
    last = (offs.data_ptr(), padded_offs.data_ptr(), offs.shape[0])
    return run(planned(key, make), operand, None, (seed, stream), last=last)[0]
