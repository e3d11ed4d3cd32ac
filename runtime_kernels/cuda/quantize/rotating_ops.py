"""The rotating quantisers on CUDA: q2::rht_quantize, q2::rht_quantize_both, q2::requantize; and
q2::quantize for the schemes they have, which is the same without a rotation.

Seeds stay on the device, so that a captured CUDA graph draws fresh coins at every replay.
"""

from collections.abc import Callable, Hashable

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.quantize.plan import (
    Draw,
    Plan,
    Quantized,
    launches,
    make_plan,
    run,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, not_served
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.argument_checks import check_operand, check_quantized
from q2compile.runtime_kernels.ops.quantize import checked as checked_without_rotation
from q2compile.runtime_kernels.ops.quantize_masked import checked as checked_masked
from q2compile.runtime_kernels.ops.rht_quantize import checked
from q2compile.runtime_kernels.registry import CUDA, kernel

_PLANS: dict[Hashable, Plan] = {}
_MOST_PLANS = 4096  # of a program whose shapes never repeat


def planned(key: Hashable, make: Callable[[], Plan]) -> Plan:
    """The plan of an earlier call like this one, or a new one: `make` checks the arguments, and
    the key holds all that it looks at."""
    plan = _PLANS.get(key)
    if plan is None:
        plan = make()
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan


def kind_of(scalar: torch.Tensor | None) -> Hashable:
    return scalar if scalar is None else (scalar.dtype, scalar.dim())


def prepare(
    x: torch.Tensor,
    scheme: str,
    transform: str,
    directions: tuple[bool, bool],
    amax: torch.Tensor | None = None,
) -> None:
    """Loads what a call with the like of x, which may be fake, will launch; for a pitch that is not
    known, whichever it may be."""
    known = statically_known_true
    if known(x.stride(1) != 1) and known(x.stride(0) == 1):
        directions = directions[::-1]
    pitch = x.stride(0) * x.element_size() % 16
    for vectors in (True, False):
        if not known(pitch != 0 if vectors else pitch == 0):
            for launch in launches(
                SOURCES[x.dtype],
                get_scheme(scheme),
                get_transform(transform),
                directions,
                vectors=vectors,
                amax_known=amax is not None,
            ):
                launch.warm_up(x.device.index)


def refuses(op: str, x: torch.Tensor, scheme: str, transform: str) -> str | None:
    """None when the kernels serve this scheme on x's device, otherwise the reason in words."""
    return not_served(scheme, transform) or refusal(op, CUDA, x.device.index, scheme)


@kernel(
    "rht_quantize",
    CUDA,
    device_type="cuda",
    refuses=lambda x, seed, scheme, transform, *rest: refuses("rht_quantize", x, scheme, transform),
    prepare=lambda x, seed, scheme, transform, transpose, stream: prepare(
        x, scheme, transform, (not transpose, transpose)
    ),
)
def rht_quantize(x, seed, scheme, transform, transpose, stream) -> Quantized:
    """See ops/rht_quantize.py."""
    draw = (seed, stream)
    draws = (None, draw) if transpose else (draw, None)
    return rotated("rht_quantize", x, scheme, transform, draws)[0]


@kernel(
    "rht_quantize_both",
    CUDA,
    device_type="cuda",
    refuses=lambda x, row_seed, col_seed, scheme, transform, stream: refuses(
        "rht_quantize_both", x, scheme, transform
    ),
    prepare=lambda x, row_seed, col_seed, scheme, transform, stream: prepare(
        x, scheme, transform, (True, True)
    ),
)
def rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream):
    """See ops/rht_quantize_both.py."""
    draws = ((row_seed, stream), (col_seed, stream))
    along_rows, along_cols = rotated("rht_quantize_both", x, scheme, transform, draws)
    return (*along_rows, *along_cols)


@kernel(
    "quantize",
    CUDA,
    device_type="cuda",
    refuses=lambda x, amax, seed, scheme, stream: refuses("quantize", x, scheme, "none"),
    prepare=lambda x, amax, seed, scheme, stream: prepare(x, scheme, "none", (True, False), amax),
)
def quantize(x, amax, seed, scheme, stream) -> Quantized:
    """See ops/quantize.py."""
    return rotated("quantize", x, scheme, "none", ((seed, stream), None), amax)[0]


def rotated(
    op: str,
    x: torch.Tensor,
    scheme: str,
    transform: str,
    draws: tuple[Draw | None, Draw | None],
    amax: torch.Tensor | None = None,
) -> list[Quantized]:
    """x along its rows, its columns or both: the results of those asked for, in this order."""
    index, shape, strides, address = x.device.index, x.shape, x.stride(), x.data_ptr()
    if len(shape) == 2 and strides[1] != 1:
        if strides[0] == 1:  # a transposed matrix lies in rows the other way
            return rotated(op, x.t(), scheme, transform, draws[::-1], amax)[::-1]
        return rotated(op, x.contiguous(), scheme, transform, draws, amax)
    aligned = address % 16 == 0
    along_rows, along_cols = draws
    kinds = (
        along_rows and kind_of(along_rows[0]),
        along_cols and kind_of(along_cols[0]),
        kind_of(amax),
    )
    directions = (along_rows is not None, along_cols is not None)
    key = (op, index, x.dtype, shape, strides, aligned, scheme, transform, directions, kinds)

    def make() -> Plan:
        check_operand(op, x)
        for draw in draws:
            if op == "quantize_masked":
                checked_masked(x, scheme, transform)
            elif draw is not None and op == "quantize":
                checked_without_rotation(x, amax, draw[0], scheme)
            elif draw is not None:
                checked(op, draw[0], scheme, transform)
        return make_plan(
            index,
            SOURCES[x.dtype],
            get_scheme(scheme),
            get_transform(transform),
            (strides[0], *shape, 0, 0),
            directions,
            vectors=aligned and strides[0] * x.element_size() % 16 == 0,
            amax_known=amax is not None,
        )

    plan = planned(key, make)
    return run(plan, (address, 0, 0), *draws, 0 if amax is None else amax.data_ptr())


def source_of(spec: Scheme) -> int:
    return SOURCES[spec.format + (SWIZZLED if spec.swizzled else "")]


def _refuses_requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream
) -> str | None:
    if get_scheme(source_scheme).swizzled and not get_scheme(scheme).swizzled:
        # Whose self-check has a source with swizzled scales, too.
        scheme = scheme.removesuffix(WIDENED) + SWIZZLED
    return refuses("requantize", codes, scheme, transform)


def _prepare_requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream
) -> None:
    source = source_of(get_scheme(source_scheme))
    spec, rotation = get_scheme(scheme), get_transform(transform)
    for launch in launches(source, spec, rotation, (False, True), vectors=True, amax_known=False):
        launch.warm_up(codes.device.index)


@kernel(
    "requantize",
    CUDA,
    device_type="cuda",
    refuses=_refuses_requantize,
    prepare=_prepare_requantize,
)
def requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream
) -> Quantized:
    """See ops/requantize.py. The source is dequantised on its way into shared memory."""
    codes, scales = codes.contiguous(), scales.contiguous()
    index, shape = codes.device.index, codes.shape
    operands = (codes.dtype, shape, scales.dtype, scales.shape, kind_of(global_scale))
    key = (index, operands, kind_of(seed), source_scheme, scheme, transform, rows)

    def make() -> Plan:
        check_quantized("requantize", codes, scales, global_scale)
        spec, rotation = checked("requantize", seed, scheme, transform)
        source = get_scheme(source_scheme)
        shift = source.block[0].bit_length() - 1  # blocks of 1 or 16 rows
        blocks = 2 * shape[1] // source.width
        extents = (shape[1], shape[0], rows, blocks, shift)
        return make_plan(index, source_of(source), spec, rotation, extents, (False, True))

    plan = planned(key, make)
    operand = (codes.data_ptr(), scales.data_ptr(), global_scale.data_ptr())
    return run(plan, operand, None, (seed, stream))[0]
