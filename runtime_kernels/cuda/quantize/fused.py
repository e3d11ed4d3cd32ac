# SPDX-License-Identifier: Apache-2.0
"""Calls of q2::quantize whose operand is computed in the kernel (prologue fusion).

Two calls whose operands are computed from the same tensors can be one call, which reads those
tensors once.

A call has no x. Only which of its other arguments are tensors counts, except in `fused_plan`.

Of all GPUs, only an H200 has run these kernels. So everywhere the first use of a scheme is preceded
by a self-check against the reference (`check_of`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.choice import InGraph
from q2compile.runtime_kernels.cuda.calls import BoundCall, LaunchPlan, tensors_of
from q2compile.runtime_kernels.cuda.jit.launch import begin_compiling
from q2compile.runtime_kernels.cuda.quantize.plan import (
    OperandSlots,
    launches,
    quantizer_plan,
)
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.quantizers import operand_slots
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SCALED_AFTERWARDS,
    SOURCES,
    RotatingKernel,
    ScaleRule,
    has_room_for_two,
    shared_memory,
)
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED
from q2compile.runtime_kernels.selfcheck import (
    apart,
    difference_of_bits,
    difference_on_any_grid,
)
from q2compile.runtime_kernels.small_calls import Form, form_of


def no_pair(prologue: PrologueExpression, call: QuantizerCall, index: int) -> str | None:
    """None if one kernel may compute and quantize both matrices of such an expression, with the
    scheme of a call, on this CUDA device; otherwise the reason in words."""
    if ScaleRule.of(call.scheme) not in SCALED_AFTERWARDS:
        # MX would spill registers. EXACT would need a pass for the maximum of each operand.
        return f"two operands of {call.scheme.name} are not quantized by one kernel"
    room = shared_memory(index)
    if not has_room_for_two(SOURCES[prologue.dtype], call.scheme, call.rowwise, room):
        return f"tiles of two {prologue.dtype} operands do not fit into shared memory"
    return None


def fused_plan(
    prologue: PrologueExpression, index: int, calls: Sequence[QuantizerCall]
) -> LaunchPlan:
    """The launch plan for CUDA device `index`. Its inputs are those of the prologue, on 16 bytes,
    then the tensors of calls.

    calls: for each matrix of the prologue; two have the same scheme and the same transform.
    """
    first = count = len(prologue.inputs)
    output = tensors = count + sum(len(tensors_of(call.positional)) for call in calls)
    operands: list[OperandSlots | None] = []
    for call in calls:
        operands += operand_slots(call, first, output)
        first += len(tensors_of(call.positional))
        output += len(call.outputs)
    extents = 0, prologue.rows, prologue.cols, 0, 0
    kernel = _kernel(prologue, calls[0], index)
    return quantizer_plan(index, kernel, extents, operands, tensors, x=(0, 0, 0))


def _kernel(prologue: PrologueExpression, call: QuantizerCall, index: int) -> RotatingKernel:
    return RotatingKernel.of(call, SOURCES[prologue.dtype], index, prologue=prologue)


def prepare(prologue: PrologueExpression, call: QuantizerCall, index: int) -> list[Future]:
    """Starts the compilation of the kernels of such a call by NVRTC, in threads."""
    return begin_compiling(launches(_kernel(prologue, call, index)), index)


def check_of(graph: InGraph, *args: Any) -> Request | None:
    """The self-check of kernels with a prologue for such a call, on a GPU.

    The first time on a machine a small prologue runs, and must give the reference's bits. It
    consists of sums and products, which all devices round alike; functions of libdevice are not
    checked.
    """
    call = QuantizerCall.of(QUANTIZE, args)
    device, prologue = call.x.device, graph.prologue
    form = form_of(QUANTIZE, call.replace(x=None).positional)
    check = QUANTIZE, FUSED, device, form, len(prologue.results), prologue.dtype
    return Request(check, __name__, check[2:]) if device.type == "cuda" else None


def compiling(device: torch.device, form: Form, operands: int, dtype: torch.dtype) -> list[Future]:
    """Threads that compile what `disagreement` launches."""
    return prepare(representative(operands, dtype), form.call, device.index)


def disagreement(
    device: torch.device, form: Form, operands: int = 1, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Runs a small prologue with inputs of all kinds through the op. None if the results have the
    reference's bits, otherwise how they differ."""
    with apart(device):
        inputs = representative_inputs()
        prologue = representative(operands, dtype)
        names = [each.seed_name for each in form.call.operands if each.seed is not None]
        calls, on_device = [], []
        for n, x in enumerate(prologue.evaluate(inputs)):
            seeds = {name: torch.tensor(10 * n + i) for i, name in enumerate(names)}
            calls.append(form.call.replace(**seeds, x=x))
            seeds = {name: seed.to(device) for name, seed in seeds.items()}
            on_device.append(calls[-1].replace(x=None, **seeds))
        want = [result for call in calls for result in call()]
        inputs = [x.to(device) for x in inputs]
        tensors = [*inputs, *(t for call in on_device for t in tensors_of(call.positional))]
        outputs = [name for call in calls for name in call.outputs]

        def difference() -> str | None:
            plan = fused_plan(prologue, device.index, on_device)
            made = BoundCall(plan, device.index).outputs_of(tensors)
            return difference_of_bits(made, want, outputs)

        return difference_on_any_grid(difference)


_ROWS, _COLS = 130, 264


@functools.cache
def representative(operands: int = 1, dtype: torch.dtype = torch.bfloat16) -> PrologueExpression:
    """((a + b) * row + c * column) where a mask holds, else 0: sums and products alone, whose bits
    are the same on every device. The second matrix is the difference of the two products."""
    index = f"{_COLS}*r + c"
    steps = (
        ("load", 0, index, "lanes", -1),
        ("load", 1, index, "lanes", -1),
        ("add", 0, 1),
        ("load", 2, "c", "lanes", -1),
        ("mul", 2, 3),
        ("load", 3, "r", "one", -1),
        ("index", "c", "first"),
        ("constant", "128", "int"),
        ("lt", 6, 7),
        ("load", 0, index, "lanes", 8),
        ("mul", 9, 5),
        ("add", 4, 10),
        ("load", 4, index, "lanes", -1),
        ("constant", "0x0.0p+0", "float"),
        ("where", 12, 11, 13),
        ("sub", 4, 10),
    )
    inputs = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bool)
    results = (14, 15)[:operands]
    return PrologueExpression(dtype, _ROWS, _COLS, inputs, False, steps, results)


def representative_inputs() -> list[torch.Tensor]:
    """The inputs of `representative`, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    matrix = (_ROWS, _COLS)
    return [
        *(normal(*matrix).bfloat16(), normal(*matrix), normal(_COLS).bfloat16(), normal(_ROWS)),
        normal(*matrix) > -1,
    ]
