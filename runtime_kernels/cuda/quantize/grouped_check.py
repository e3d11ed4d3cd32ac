# SPDX-License-Identifier: Apache-2.0
"""The choice of a grouped launch, and its self-check: one tail kernel for the operands of several
calls, batched launches, and products of global scales. Each call by itself is checked before
(selfcheck.py).

A group is checked with small operands that differ from call to call, so that an operand that is
taken for another one shows. If it is rejected, its calls are launched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.choice import KERNELS, Kernel, add, device_of, kernels, nothing
from q2compile.runtime_kernels.cuda.calls import BoundCall, Launching, tensors_of
from q2compile.runtime_kernels.cuda.jit.launch import begin_compiling
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import (
    ScaleProduct,
    compile_ahead,
    grouped_plan,
)
from q2compile.runtime_kernels.ops.table import SPECS
from q2compile.runtime_kernels.registry import CUDA, GROUPED, REFERENCE, select
from q2compile.runtime_kernels.selfcheck import (
    apart,
    as_tuple,
    difference_of_bits,
    difference_on_any_grid,
    moved_to,
)
from q2compile.runtime_kernels.small_calls import ROWS, Form, arguments, form_of, outputs_of


class Group(NamedTuple):
    """Calls with one grouped launch. others: how many factors of products no call makes."""

    calls: tuple[Form, ...]
    products: tuple[ScaleProduct, ...] = ()
    others: int = 0

    def __str__(self) -> str:
        pairs = ", ".join(f"{own} * {other}" for own, other in self.products)
        calls = " + ".join(map(str, self.calls))
        return f"grouped: {calls}{pairs and f'; products {pairs}'}"


def group_of(calls: tuple, products: tuple, others: int) -> Group:
    """calls: the op and all arguments of each."""
    return Group(tuple(form_of(op, args) for op, *args in calls), products, others)


def _check_of(op: str, name: str, calls: tuple, *more: Any) -> Request | None:
    device = device_of(calls)
    return request_of(group_of(calls, *more), device) if device.type == "cuda" else None


# `choose(GROUP, (calls, products, others))` chooses the grouped launch, or the calls one by one.
GROUP = "group"
KERNELS[GROUP] = [Kernel(GROUP, REFERENCE, None, nothing)]
add(Kernel(GROUP, GROUPED, None, nothing, check=_check_of))


def request_of(group: Group, device: torch.device) -> Request:
    """The self-check of a group."""
    return Request((group.calls[0].op, GROUPED, device, group), __name__, (device, group))


def compiling(device: torch.device, group: Group) -> list[Future]:
    """Threads that compile the kernels of a group."""
    with apart(torch.device("cpu")):
        cases = [(call.op, [_arguments(n, call)]) for n, call in enumerate(group.calls)]
    found = [_launching(op).launches_of(of_call) for op, of_call in cases]
    of_calls = begin_compiling([each for launches in found for each in launches], device.index)
    return compile_ahead(found, device.index) + of_calls


def _launching(op: str) -> Launching:
    found: Launching = next(k.launching for k in kernels(op) if k.name == CUDA)
    return found


def disagreement(device: torch.device, group: Group) -> str | None:
    """Runs a group on small inputs. None if all results have the references' bits, otherwise how
    they differ."""
    with apart(device):
        ops = [call.op for call in group.calls]
        given = [_arguments(number, call) for number, call in enumerate(group.calls)]
        others = [torch.tensor(0.3 + number) for number in range(group.others)]
        made = [as_tuple(select(op, a, REFERENCE)(*a)) for op, a in zip(ops, given, strict=True)]
        want = [result for each in made for result in each]
        names = [
            f"{name} of call {number}"
            for number, call in enumerate(group.calls, 1)
            for name in outputs_of(call)
        ]
        for (call, own), other in group.products:
            factor = others[other] if isinstance(other, int) else made[other[0]][other[1]]
            want.append(made[call][own] * factor)
            names.append(f"products of the global scale of call {call + 1}")
        members = [(op, moved_to(device, a)) for op, a in zip(ops, given, strict=True)]
        on_device = moved_to(device, others)
        return difference_on_any_grid(
            lambda: difference_of_bits(_run(group, members, on_device, device.index), want, names)
        )


def _arguments(number: int, call: Form) -> tuple:
    """Arguments of call `number`: another number of rows than the other calls, or, if the ends of
    groups fix it, the same rows in another order."""
    of_call = arguments(call, ROWS[0] + 3 * number)
    if call.op in SPECS and call.call.grouped:
        of_call = of_call[0].roll(number, 0), *of_call[1:]
    return of_call


def _run(
    group: Group, members: Sequence[tuple[str, Sequence[Any]]], others: list, index: int
) -> list[torch.Tensor]:
    """All results, and the products."""
    launchings = [_launching(op) for op, _ in members]
    laid_out = [by.in_layout(args) for by, (_, args) in zip(launchings, members, strict=True)]
    plans = [by.plan(*args) for by, args in zip(launchings, laid_out, strict=True)]
    plan = grouped_plan(plans, group.products, group.others)
    operands = [t for args in laid_out for t in tensors_of(args)]
    return BoundCall(plan, index).outputs_of([*operands, *others])
