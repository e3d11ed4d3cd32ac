# SPDX-License-Identifier: Apache-2.0
"""q2::quantize and q2::requantize on CUDA: rotate_quantize.cu, in the launch plans of plan.py; for
schemes whose scales serve rowwise and columnwise, transposable.cu.

- Seeds stay on the device, so that a captured CUDA graph draws new random bits at every replay.
- Ends of groups stay there, too. The padded layout of groups is never written to memory: a thread
  block looks up which rows are in its tile, and reads those.
- Sums of columns (dbias) are made for each tile, and added up by the tail kernel (sums.cuh).
- Codes of a source are dequantized on their way into shared memory. A source that is rounded to
  given scales is rounded once it is there.
"""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import (
    BufferSlot,
    LaunchPlan,
    OperandLayout,
    aligned,
    launching,
    tensors_of,
)
from q2compile.runtime_kernels.cuda.quantize import transposable
from q2compile.runtime_kernels.cuda.quantize.plan import (
    Dbias,
    Groups,
    OperandSlots,
    quantizer_plan,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    ROUNDED,
    ROUNDED_SWIZZLED,
    SCALED_AT_ONCE,
    SOURCES,
    RotatingKernel,
    ScaleRule,
    not_served,
)
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED
from q2compile.runtime_kernels.ops import quantize as quantize_op
from q2compile.runtime_kernels.ops import requantize as requantize_op
from q2compile.runtime_kernels.ops.table import (
    QUANTIZE,
    REQUANTIZE,
    QuantizerCall,
)
from q2compile.runtime_kernels.small_calls import wants_rows


def why_not(call: QuantizerCall) -> str | None:
    """None if the kernels serve such a call on some device; otherwise the reason in words."""
    rule = ScaleRule.of(call.scheme)
    if call.recorded:
        return "statistics are computed after the kernel of the same call without them"
    if call.by_scales and call.x.dtype != torch.bfloat16:
        return f"it rounds bf16 to given scales, not {call.x.dtype}"
    if call.dbias is not None and rule == ScaleRule.EXACT:
        return f"{call.scheme.name} has no tail kernel, which could add up the sums of tiles"
    if call.scheme.is_transposable:
        return transposable.why_not(call)
    if call.grouped and call.scheme.swizzled and rule in SCALED_AT_ONCE:
        return "rotate_quantize.cu leaves the last tile of swizzled scales to rows, not to groups"
    return not_served(
        call.scheme.name,
        call.transform.name,
        masked=call.masked,
        rotates_rows=call.rotates_rows,
    )


def rows_too_far_apart(x: torch.Tensor) -> bool:
    """Whether rows, or columns, of a matrix are known to be 2^32 bytes apart."""
    steps = (step * x.element_size() for step in x.stride())
    return any(statically_known_true(step >= 1 << 32) for step in steps)


def _why_not(call: QuantizerCall) -> str | None:
    if rows_too_far_apart(call.x):
        return "the kernel counts the bytes from row to row of x in 32 bits"
    return why_not(call)


# ---- from a matrix ----


def _layouts(*args: Any) -> dict[int, OperandLayout]:
    call = QuantizerCall.of(QUANTIZE, args)
    layouts = {0: OperandLayout.ROWS if wants_rows(call) else OperandLayout.ROWS_OR_COLUMNS}
    if call.grouped:
        layouts |= _layouts_of_ends(call)
    return layouts


def _layouts_of_ends(call: QuantizerCall) -> dict[int, OperandLayout]:
    names = list(call.args)
    return dict.fromkeys(map(names.index, ("offs", "padded_offs")), OperandLayout.CONTIGUOUS)


@launching(
    QUANTIZE,
    why_not=lambda *args: _why_not(QuantizerCall.of(QUANTIZE, args)),
    layouts=_layouts,
)
def quantize(*args: Any) -> LaunchPlan:
    """See ops/quantize.py."""
    call = quantize_op.checked_quantize(QuantizerCall.of(QUANTIZE, args))
    x, slots, inputs = call.x, tensor_slots(call), len(tensors_of(args))
    groups = _groups(call, slots)
    rowwise, columnwise = operand_slots(call, 0, inputs)
    dbias = None
    if call.dbias is not None:
        dbias = Dbias(inputs + call.outputs.index("dbias"), call.dbias)
    if x.stride(1) != 1:
        assert not wants_rows(call)
        x, (rowwise, columnwise) = x.t(), (columnwise, rowwise)
    if call.scheme.is_transposable:
        firsts = [operand and operand.first for operand in (rowwise, columnwise)]
        return transposable.quantizing_plan(call, x, firsts, inputs, slots.get("amax"), groups)
    kernel = RotatingKernel.of(
        *(call, SOURCES[x.dtype], x.device.index),
        rowwise=rowwise is not None,
        columnwise=columnwise is not None,
        vectors=aligned(x) and x.stride(0) * x.element_size() % 16 == 0,
    )
    return quantizer_plan(
        x.device.index,
        kernel,
        (x.stride(0), *x.shape, 0, 0),
        (rowwise, columnwise),
        inputs,
        x=(BufferSlot(0), 0, 0),
        amax=slots.get("amax", 0),
        groups=groups,
        dbias=dbias,
    )


def tensor_slots(call: QuantizerCall, first: int = 0) -> dict[str, BufferSlot]:
    """The slots of a call's arguments that are tensors. first: that of the first one."""
    tensors = [name for name, arg in call.args.items() if isinstance(arg, torch.Tensor)]
    return {name: BufferSlot(i) for i, name in enumerate(tensors, first)}


def operand_slots(call: QuantizerCall, first: int, output: int) -> list[OperandSlots | None]:
    """Rowwise, columnwise. first, output: the numbers of the first input and output of the call."""
    found: list[OperandSlots | None] = [None, None]
    slots = tensor_slots(call, first)
    for operand in call.operands:
        seed = slots.get(operand.seed_name, 0)
        made = OperandSlots(seed, call.args["rng_offset"], output + operand.first)
        found[operand.columnwise] = made
    return found


def _groups(call: QuantizerCall, slots: dict[str, BufferSlot]) -> Groups | None:
    if not call.grouped:
        return None
    return Groups(slots["offs"], slots["padded_offs"], call.args["offs"].shape[0])


# ---- from codes, or by scales ----


def _source_of(call: QuantizerCall) -> int:
    scheme = call.source_scheme
    assert scheme is not None
    if call.by_scales:
        return ROUNDED_SWIZZLED if scheme.swizzled else ROUNDED
    return SOURCES[scheme.format + (SWIZZLED if scheme.swizzled else "")]


def _requantize_layouts(*args: Any) -> dict[int, OperandLayout]:
    call = QuantizerCall.of(REQUANTIZE, args)
    layouts = {
        0: OperandLayout.CONTIGUOUS,
        1: OperandLayout.ALIGNED if call.by_scales else OperandLayout.CONTIGUOUS,
    }
    return layouts | (_layouts_of_ends(call) if call.grouped else {})


@launching(
    REQUANTIZE,
    why_not=lambda *args: _why_not(QuantizerCall.of(REQUANTIZE, args)),
    layouts=_requantize_layouts,
)
def requantize(*args: Any) -> LaunchPlan:
    """See ops/requantize.py."""
    call = requantize_op.checked_requantize(QuantizerCall.of(REQUANTIZE, args))
    source, x = call.source_scheme, call.x
    assert source is not None
    slots, inputs = tensor_slots(call), len(tensors_of(args))
    if call.by_scales:
        extents = (x.stride(0), *x.shape, ceil_div(x.shape[1], source.width), 0)
    else:
        height, half = x.shape
        shift = source.block[0].bit_length() - 1  # blocks of 1, 16 or 32 rows
        extents = (half, height, call.args["rows"], 2 * half // source.width, shift)
    vectors = aligned(x) and x.shape[1] % 8 == 0 if call.by_scales else True
    return quantizer_plan(
        x.device.index,
        RotatingKernel.of(call, _source_of(call), x.device.index, vectors=vectors),
        extents,
        operand_slots(call, 0, inputs),
        inputs,
        x=(BufferSlot(0), BufferSlot(1), BufferSlot(2)),
        groups=_groups(call, slots),
    )
