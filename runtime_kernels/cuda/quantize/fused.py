# SPDX-License-Identifier: Apache-2.0
"""Calls of q2::quantize whose operand is computed in the kernel (prologue fusion).

Two calls whose operands are computed from the same tensors can be one call, which reads those
tensors once.

A call is given by its keywords: all arguments of q2::quantize but x.

Of all GPUs, only an H200 has run these kernels. So everywhere the first use of a scheme is preceded
by a self-check against the reference (`rejection`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.calls import BoundCall, BufferSlot, LaunchPlan
from q2compile.runtime_kernels.cuda.check_results import Request
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import architecture
from q2compile.runtime_kernels.cuda.quantize.plan import (
    BoundPrologue,
    OperandSlots,
    launches,
    quantizer_plan,
)
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    has_room_for_two,
    shared_memory,
)
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, ScaleRule
from q2compile.runtime_kernels.cuda.selfcheck import (
    apart,
    difference_of_bits,
    difference_on_any_grid,
)
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED

Keywords = Mapping[str, Any]


def call_of(keywords: Keywords) -> QuantizerCall:
    """The call with these keywords."""
    return QuantizerCall.named(QUANTIZE, x=None, **keywords)


def no_pair(prologue: PrologueExpression, keywords: Keywords, index: int) -> str | None:
    """None if one kernel may compute and quantize both matrices of such an expression, with the
    scheme of a call, on this CUDA device; otherwise the reason in words."""
    call = call_of(keywords)
    if ScaleRule.of(call.scheme) not in SCALED_AFTERWARDS:
        # MX would spill registers. EXACT would need a pass for the maximum of each operand.
        return f"two operands of {call.scheme.name} are not quantized by one kernel"
    room = shared_memory(index)
    if not has_room_for_two(SOURCES[prologue.dtype], call.scheme, call.rowwise, room):
        return f"tiles of two {prologue.dtype} operands do not fit into shared memory"
    return None


def fused_plan(
    prologue: PrologueExpression,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    calls: Sequence[Keywords],
) -> LaunchPlan:
    """The launch plan.

    inputs: of the prologue, on 16 bytes.  sizes: the values of its sizes.
    calls: for each of its matrices; two have the same scheme and the same transform. The inputs of
        the plan are `inputs`, then the tensors of calls (`tensors_in`).
    """
    count = len(inputs)
    tensors = count + sum(len(tensors_in(keywords)) for keywords in calls)
    operands: list[OperandSlots | None] = []
    tensor, output = count, tensors
    for call in map(call_of, calls):
        given = [name for name, arg in call.args.items() if isinstance(arg, torch.Tensor)]
        slots = {name: BufferSlot(tensor + i) for i, name in enumerate(given)}
        found: list[OperandSlots | None] = [None, None]
        for operand in call.operands:
            seed = slots.get(operand.seed_name, 0)
            made = OperandSlots(seed, call.args["rng_offset"], output + operand.first)
            found[operand.columnwise] = made
        operands += found
        tensor += len(given)
        output += len(call.outputs)
    fields: tuple[BufferSlot | int, ...] = (*map(BufferSlot, range(count)), *map(int, sizes))
    return quantizer_plan(
        inputs[0].device.index,
        SOURCES[prologue.dtype],
        call.scheme,
        call.transform,
        (0, prologue.height(sizes), prologue.cols, 0, 0),
        operands,
        tensors,
        x=(0, 0, 0),
        prologue=BoundPrologue(prologue, fields),
        rotates_rows=call.rotates_rows,
    )


def tensors_in(keywords: Keywords) -> list[Any]:
    """The tensors that a call is given beside x, or what stands for them, in the order of the op's
    schema."""
    return [arg for arg in call_of(keywords).args.values() if _is_tensor(arg)]


def prepare(prologue: PrologueExpression, keywords: Keywords, index: int) -> list[Future]:
    """Has NVRTC begin to compile the kernels of such a call, in threads."""
    call = call_of(keywords)
    needed = launches(
        SOURCES[prologue.dtype],
        call.scheme,
        call.transform,
        (call.rowwise, call.columnwise),
        room=shared_memory(index),
        vectors=True,
        amax_known=False,
        prologue=prologue,
        rotates_rows=call.rotates_rows,
    )
    return [nvrtc.begin(launch.variant, architecture(index)) for launch in needed]


def rejection(
    index: int, keywords: Keywords, operands: int = 1, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """None if kernels with a prologue may be used with such a call on this CUDA device; otherwise
    the reason in words.

    The first time on a machine a small prologue runs, and must give the reference's bits. It
    consists of sums and products, which all devices round alike; functions of libdevice are not
    checked.

    operands: how many one kernel computes and quantizes.  dtype: of those.
    """
    return checks.rejection(_request(index, keywords, operands, dtype))


def begin(index: int, keywords: Keywords, operands: int = 1) -> None:
    """Starts that self-check of bf16 operands, unless its result is known; threads compile its
    kernels."""
    request = _request(index, keywords, operands, torch.bfloat16)
    prologue = representative(operands)
    one_or_fits = operands == 1 or no_pair(prologue, keywords, index) is None
    if one_or_fits and not checks.is_known(request):
        checks.begin(request, prepare(prologue, keywords, index))


def _request(index: int, keywords: Keywords, operands: int, dtype: torch.dtype) -> Request:
    call, device = call_of(keywords), torch.device("cuda", index)
    how = call.scheme.name, call.transform.name, call.variant, operands, dtype
    plain = {name: ... if _is_tensor(arg) else arg for name, arg in keywords.items()}
    return Request((QUANTIZE, FUSED, device, *how), __name__, (device, plain, operands, dtype))


def disagreement(
    device: torch.device,
    keywords: Keywords,
    operands: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Runs a small prologue with inputs of all kinds through the op. None if the results have the
    reference's bits, otherwise how they differ. keywords: it counts which tensors are among them,
    not what the tensors hold."""
    like = call_of(keywords)
    with apart(device):
        inputs = representative_inputs()
        prologue = representative(operands, dtype)
        matrices = prologue.evaluate(inputs)
        calls = [
            {
                name: torch.tensor(10 * n + i) if _is_tensor(arg) else arg
                for i, (name, arg) in enumerate(keywords.items(), 7)
            }
            for n in range(len(matrices))
        ]
        quantize = like.spec.overload
        want = [r for x, given in zip(matrices, calls, strict=True) for r in quantize(x, **given)]
        on_device = [t.to(device) for t in inputs]
        calls = [
            {name: arg.to(device) if _is_tensor(arg) else arg for name, arg in given.items()}
            for given in calls
        ]
        seeds = [t for given in calls for t in tensors_in(given)]
        names = like.outputs * len(matrices)

        def difference() -> str | None:
            plan = fused_plan(prologue, on_device, (), calls)
            made = BoundCall(plan, device.index).outputs_of([*on_device, *seeds])
            return difference_of_bits(made, want, names)

        return difference_on_any_grid(difference)


def _is_tensor(arg: Any) -> bool:
    """Whether it is a tensor, or stands for one: an open argument of a call site, a node of
    Inductor's."""
    return isinstance(arg, torch.Tensor) or arg is ... or hasattr(arg, "get_size")


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
    return PrologueExpression(dtype, str(_ROWS), _COLS, inputs, (), False, steps, results)


def representative_inputs() -> list[torch.Tensor]:
    """Its inputs, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    matrix = (_ROWS, _COLS)
    return [
        *(normal(*matrix).bfloat16(), normal(*matrix), normal(_COLS).bfloat16(), normal(_ROWS)),
        normal(*matrix) > -1,
    ]
