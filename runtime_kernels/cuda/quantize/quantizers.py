# SPDX-License-Identifier: Apache-2.0
"""q2::quantize and q2::requantize on CUDA: rotate_quantize.cu, in the calls of plan.py.

Seeds stay on the device, so that a captured CUDA graph draws fresh random bits at every replay. So
do the ends of groups, and their padded layout exists nowhere: a thread block looks up which rows a
tile of it holds, and reads those. Sums of columns are summed by tiles, and added up by the launch
that ends the call (sums.cuh). Codes of a source are dequantized on their way into shared memory; a
source that is rounded to scales is rounded once it is there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, aligned, launching, tensors_of
from q2compile.runtime_kernels.cuda.checked_cases import Use, used
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
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AT_ONCE, Rule
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED
from q2compile.runtime_kernels.ops import quantize as quantize_op
from q2compile.runtime_kernels.ops import requantize as requantize_op
from q2compile.runtime_kernels.ops.table import QUANTIZE, REQUANTIZE, QuantizerCall, Variant
from q2compile.runtime_kernels.registry import CUDA


def why_not(call: QuantizerCall) -> str | None:
    """None when the kernels serve such a call, whatever the device; otherwise the reason in
    words."""
    rule = Rule.of(call.scheme)
    if call.recorded:
        return "statistics are computed beside the kernel of the same call without them"
    if call.by_scales and call.x.dtype != torch.bfloat16:
        return f"it rounds bf16 to given scales, not {call.x.dtype}"
    if call.dbias is not None and rule == Rule.EXACT:
        return (
            f"{call.scheme.name} has no launch behind the codes, which could add up the sums of "
            "tiles"
        )
    if call.grouped and call.scheme.swizzled and rule in SCALED_AT_ONCE:
        return "rotate_quantize.cu leaves the last tile of swizzled scales to rows, not to groups"
    return not_served(call.scheme.name, call.transform.name, masked=call.masked)


def _refuses(call: QuantizerCall) -> str | None:
    scheme, source = call.scheme, call.source_scheme
    if source is not None and source.swizzled and not scheme.swizzled:
        # Whose self-check has a source with swizzled scales, too.
        scheme = scheme.with_form(SWIZZLED)
    return why_not(call) or refusal(
        call.spec.name, CUDA, call.x.device.index, scheme.name, _use(call)
    )


def _use(call: QuantizerCall) -> Variant | Use:
    """Of unaligned rows only where that is known: a size may be a symbol."""
    x, known = call.x, statically_known_true
    if call.spec.name == REQUANTIZE:
        odd = known(x.shape[1] % 8 != 0) if call.by_scales else False
        return used(call.variant, call.transform.name, vectors=not odd)
    pitch = x.shape[1]  # of what is copied
    if known(x.stride(1) == 1):
        pitch = x.stride(0)
    elif known(x.stride(0) == 1) and not _wants_rows(call):
        pitch = x.stride(1)
    vectors = not known(pitch * x.element_size() % 16 != 0)
    return used(call.variant, call.transform.name, x.dtype, vectors)


# ---- from a matrix ----


def _launched(*args: Any) -> Iterator[Launch]:
    """What a call with the like of x, which may be fake, launches; for a pitch that is not known,
    whichever it may be."""
    call, known = QuantizerCall.of(QUANTIZE, args), statically_known_true
    x, directions = call.x, (call.rowwise, call.columnwise)
    if _wants_rows(call):
        x = x if known(x.stride(1) == 1) else x.contiguous()  # it is copied
    elif known(x.stride(1) != 1) and known(x.stride(0) == 1):
        directions = directions[::-1]
    pitch = x.stride(0) * x.element_size() % 16
    for vectors in (True, False):
        if not known(pitch != 0 if vectors else pitch == 0):
            yield from launches(
                SOURCES[x.dtype],
                call.scheme,
                call.transform,
                directions,
                room=shared_memory(x.device.index),
                vectors=vectors,
                amax_known=call.args["amax"] is not None,
                grouped=call.grouped,
                sums=call.dbias is not None,
            )


def _wants_rows(call: QuantizerCall) -> bool:
    """Whether rows of x must be contiguous; otherwise a transposed matrix lies in rows the other
    way, and its directions are swapped."""
    return call.grouped or call.masked or call.dbias is not None


def _forms(*args: Any) -> dict[int, Form]:
    call = QuantizerCall.of(QUANTIZE, args)
    forms = {0: Form.ROWS if _wants_rows(call) else Form.LINES}
    if call.grouped:
        forms |= _forms_of_ends(call)
    return forms


def _forms_of_ends(call: QuantizerCall) -> dict[int, Form]:
    names = list(call.args)
    return dict.fromkeys(map(names.index, ("offs", "padded_offs")), Form.CONTIGUOUS)


@launching(
    QUANTIZE,
    refuses=lambda *args: _refuses(QuantizerCall.of(QUANTIZE, args)),
    launches=_launched,
    forms=_forms,
)
def quantize(*args: Any) -> Call:
    """See ops/quantize.py."""
    call = quantize_op.checked(QuantizerCall.of(QUANTIZE, args))
    x, places, operands = call.x, _places(call), len(tensors_of(args))
    rowwise, columnwise = _directions(call, places, operands)
    summed = None
    if call.dbias is not None:
        summed = Summed(operands + call.outputs.index("dbias"), call.dbias)
    if x.stride(1) != 1:
        assert not _wants_rows(call)
        x, (rowwise, columnwise) = x.t(), (columnwise, rowwise)
    return quantizer_call(
        x.device.index,
        SOURCES[x.dtype],
        call.scheme,
        call.transform,
        (x.stride(0), *x.shape, 0, 0),
        (rowwise, columnwise),
        operands,
        operand=(At(0), 0, 0),
        amax=places.get("amax", 0),
        vectors=aligned(x) and x.stride(0) * x.element_size() % 16 == 0,
        groups=_groups(call, places),
        summed=summed,
    )


def _places(call: QuantizerCall) -> dict[str, At]:
    """Which of the tensors of a call its arguments are."""
    tensors = [name for name, arg in call.args.items() if isinstance(arg, torch.Tensor)]
    return {name: At(i) for i, name in enumerate(tensors)}


def _directions(
    call: QuantizerCall, places: dict[str, At], operands: int
) -> Sequence[Direction | None]:
    """Rowwise, columnwise. operands: how many tensors are before the outputs."""
    found: list[Direction | None] = [None, None]
    for operand in call.operands:
        seed = places.get(operand.seed_name, 0)
        made = Direction(seed, call.args["rng_offset"], operands + operand.first)
        found[operand.columnwise] = made
    return found


def _groups(call: QuantizerCall, places: dict[str, At]) -> Groups | None:
    if not call.grouped:
        return None
    return Groups(places["offs"], places["padded_offs"], call.args["offs"].shape[0])


# ---- from codes, or by scales ----


def _source_of(call: QuantizerCall) -> int:
    scheme = call.source_scheme
    assert scheme is not None
    if call.by_scales:
        return ROUNDED_SWIZZLED if scheme.swizzled else ROUNDED
    return SOURCES[scheme.format + (SWIZZLED if scheme.swizzled else "")]


def _launched_again(*args: Any) -> Iterator[Launch]:
    """For a pitch that is not known, whichever it may be."""
    call = QuantizerCall.of(REQUANTIZE, args)
    for vectors in (True, False):
        odd = call.x.shape[1] % 8 != 0 if call.by_scales else False
        if not statically_known_true(odd == vectors):
            yield from launches(
                _source_of(call),
                call.scheme,
                call.transform,
                (False, True),
                room=shared_memory(call.x.device.index),
                vectors=vectors,
                amax_known=False,
                grouped=call.grouped,
            )


def _forms_again(*args: Any) -> dict[int, Form]:
    call = QuantizerCall.of(REQUANTIZE, args)
    forms = {0: Form.CONTIGUOUS, 1: Form.ALIGNED if call.by_scales else Form.CONTIGUOUS}
    return forms | (_forms_of_ends(call) if call.grouped else {})


@launching(
    REQUANTIZE,
    refuses=lambda *args: _refuses(QuantizerCall.of(REQUANTIZE, args)),
    launches=_launched_again,
    forms=_forms_again,
)
def requantize(*args: Any) -> Call:
    """See ops/requantize.py."""
    call = requantize_op.checked(QuantizerCall.of(REQUANTIZE, args))
    source, x = call.source_scheme, call.x
    assert source is not None
    places, operands = _places(call), len(tensors_of(args))
    if call.by_scales:
        extents = (x.stride(0), *x.shape, ceil_div(x.shape[1], source.width), 0)
    else:
        height, half = x.shape
        shift = source.block[0].bit_length() - 1  # blocks of 1 or 16 rows
        extents = (half, height, call.args["rows"], 2 * half // source.width, shift)
    return quantizer_call(
        x.device.index,
        _source_of(call),
        call.scheme,
        call.transform,
        extents,
        _directions(call, places, operands),
        operands,
        operand=(At(0), At(1), At(2)),
        vectors=aligned(x) and x.shape[1] % 8 == 0 if call.by_scales else True,
        groups=_groups(call, places),
    )
