# SPDX-License-Identifier: Apache-2.0
"""Grouped launches: one tail kernel for several quantizers, which also multiplies their global
scales.

separate   rotate x, align x, rotate w, align w, product of the global scales, GEMM
grouped    rotate x, rotate w, align both and multiply their global scales, GEMM
           rotate x and w by a batched launch, if their kernels are equal and neither is large
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from q2compile.runtime_kernels.cuda.calls import (
    ALIGNMENT,
    MOST_OPERANDS,
    BufferSlot,
    LaunchPlan,
    LaunchStep,
    Output,
    in_places,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, begin_compiling
from q2compile.runtime_kernels.cuda.quantize.align_scales import Alignment, TailOperand
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import batched_launch

T = TypeVar("T")


class Tail(NamedTuple):
    """The last launch of a quantizer.

    launch    the kernel, if it can serve other quantizers, too; else None
    operands  the number of this quantizer's operands that it works on
    """

    launch: Launch | None
    operands: int


def can_share(tails: Sequence[Tail]) -> bool:
    """Return whether adjacent quantizers can share their last launch: they use the same kernel, and
    it has room for all of their operands."""
    launch = tails[0].launch
    alike = launch is not None and all(tail.launch == launch for tail in tails)
    return alike and sum(tail.operands for tail in tails) <= MOST_OPERANDS


def groups_of(
    quantizers: Iterable[T], tail_of: Callable[[T], Tail]
) -> list[tuple[Launch | None, list[T]]]:
    """Adjacent quantizers, in groups that share their last launch: (launch, group). One that can't
    share it is a group of its own, with None."""
    groups: list[tuple[Launch | None, list[T]]] = []
    tails: list[Tail] = []
    for quantizer in quantizers:
        tails.append(tail_of(quantizer))
        if len(tails) > 1 and can_share(tails):
            groups[-1][1].append(quantizer)
        else:
            groups.append((tails[-1].launch, [quantizer]))
            del tails[:-1]
    return groups


class ScaleProduct(NamedTuple):
    """The product of the global scales of two operands of a GEMM.

    own: one of them, as the number of the call that makes it, and which output of that call it is.
    other: the other one, in the same way; or its number among the tensors that are given besides.
    """

    own: tuple[int, int]
    other: tuple[int, int] | int


def grouped_plan(
    plans: Sequence[LaunchPlan],
    products: Sequence[ScaleProduct] = (),
    others: int = 0,
) -> LaunchPlan:
    """One plan for several that have the same tail kernel.

    Its inputs are those of all plans, then `others` tensors of one fp32 each. Its outputs are those
    of all plans, then the products.
    """
    slots = _Slots(plans, len(products), others)
    steps = _merged(
        _moved(step, i, slots) for i, plan in enumerate(plans) for step in plan.steps[:-1]
    )
    tails: list[Alignment] = [plan.tail for plan in plans]
    assert None not in tails and len({tail.launch for tail in tails}) == 1
    operands = [o for i, each in enumerate(tails) for o in slots.of_all(i, each.operands)]
    tail = replace(
        tails[0],
        operands=tuple(_multiplying(operands, slots, products)),
        thread_blocks=max(each.thread_blocks for each in tails),
        sums=tuple(each for i, one in enumerate(tails) for each in slots.of_all(i, one.sums)),
        summing=next((each.summing for each in tails if each.summing is not None), None),
    )
    outputs = [output for plan in plans for output in plan.outputs]
    outputs += [Output((), torch.float32)] * len(products)
    steps.append(tail.step)
    return LaunchPlan(slots.inputs, tuple(outputs), slots.workspace_bytes, tuple(steps), tail)


def compile_ahead(calls: Iterable[Iterable[Launch]], index: int) -> list[Future]:
    """Starts the compilation of a group's batched launches, which no call has by itself, in
    threads.

    calls: the launches of each.
    """
    alike = Counter(launch for launches in calls for launch in launches)
    batched = [batched_launch(launch) for launch, count in alike.items() if count > 1]
    return begin_compiling(filter(None, batched), index)


def _moved(step: LaunchStep, i: int, slots: _Slots) -> LaunchStep:
    return step._replace(values=[slots.of(i, value) for value in step.values])


def _merged(steps: Iterable[LaunchStep]) -> list[LaunchStep]:
    """The steps; those with equal batched launches are merged into one, where the first of them
    was. That is in order: no plan reads what another one writes, and of its own steps only the tail
    reads what earlier ones wrote."""
    alike: dict[Any, list[LaunchStep]] = {}
    for number, step in enumerate(steps):
        alike.setdefault(step.batched or number, []).append(step)
    return [_as_one(group) if len(group) > 1 else group[0] for group in alike.values()]


def _as_one(steps: Sequence[LaunchStep]) -> LaunchStep:
    launch = steps[0].batched
    assert launch is not None
    grid = max(step.grid[0] for step in steps), len(steps)
    return LaunchStep(launch, grid, in_places([step.values for step in steps]))


def _multiplying(
    operands: Sequence[TailOperand], slots: _Slots, products: Sequence[ScaleProduct]
) -> list[TailOperand]:
    """The operands, which also write the products."""
    operands = list(operands)
    numbers = {operand.global_scale: number for number, operand in enumerate(operands)}
    for i, (own, other) in enumerate(products):
        number = numbers[slots.output(*own)]
        known = isinstance(other, int)
        operands[number] = operands[number]._replace(
            product=slots.product(i),
            other=slots.other(other) if isinstance(other, int) else 0,
            partner=-1 if known else numbers[slots.output(*other)],  # type: ignore[misc]
        )
    return operands


class _Slots:
    """The buffer slots of each plan, moved to their places in the grouped plan."""

    def __init__(self, plans: Sequence[LaunchPlan], products: int, others: int) -> None:
        self._plans = plans
        self._inputs = _sums(plan.inputs for plan in plans)
        self.inputs = self._inputs[-1] + others
        self._outputs = [self.inputs + n for n in _sums(len(plan.outputs) for plan in plans)]
        self._workspace = self._outputs[-1] + products
        parts = (-(-plan.workspace // ALIGNMENT) * ALIGNMENT for plan in plans)
        *self._parts, self.workspace_bytes = _sums(parts)

    def of(self, i: int, field: Any) -> Any:
        """A field of a step of plan i: a slot becomes that of the same tensor, others are kept."""
        if not isinstance(field, BufferSlot):
            return field
        plan, (tensor, offset) = self._plans[i], field
        if tensor < plan.inputs:
            return BufferSlot(self._inputs[i] + tensor, offset)
        if tensor < plan.inputs + len(plan.outputs):
            return BufferSlot(self._outputs[i] + tensor - plan.inputs, offset)
        return BufferSlot(self._workspace, self._parts[i] + offset)

    def of_all(self, i: int, structs: Sequence[Any]) -> list[Any]:
        """The slots of structs of fields, moved as `of` moves those of one."""
        return [type(each)(*(self.of(i, field) for field in each)) for each in structs]

    def output(self, i: int, number: int) -> BufferSlot:
        return BufferSlot(self._outputs[i] + number)

    def other(self, number: int) -> BufferSlot:
        return BufferSlot(self._inputs[-1] + number)

    def product(self, number: int) -> BufferSlot:
        return BufferSlot(self._outputs[-1] + number)


def _sums(sizes: Any) -> list[int]:
    """The running sums: 0, the first size, the sum of the first two, ..., of all."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found
