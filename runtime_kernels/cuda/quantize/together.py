# SPDX-License-Identifier: Apache-2.0
"""Calls that end in one launch; that of quantizers also multiplies their global scales.

apart      rotate x, align x, rotate w, align w, product of the global scales, GEMM
together   rotate x, rotate w, align both and multiply their global scales, GEMM
           or rotate x and w, ... where the same kernel rotates them and neither is large

apart      dequantize x, dequantize w, GEMM of bf16 numbers
together   dequantize both, GEMM
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.calls import (
    ALIGNMENT,
    At,
    Call,
    Output,
    Step,
    in_places,
)
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch, architecture
from q2compile.runtime_kernels.cuda.quantize.align_scales import Alignment, Side
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import several_launch


class Product(NamedTuple):
    """Of the global scales of two operands of a GEMM.

    own: the call, by number, that makes the one, and which of its outputs that is.
    other: the same of the other; or where that is known, its number among the other tensors.
    """

    own: tuple[int, int]
    other: tuple[int, int] | int


def together(
    calls: Sequence[Call],
    products: Sequence[Product] = (),
    others: int = 0,
) -> Call:
    """One call for several, whose endings have one launch.

    Its operands are those of all, then `others` tensors, each one fp32; its outputs are those of
    all, then the products.
    """
    places = _Places(calls, len(products), others)
    steps = _merged(
        _moved(step, i, places) for i, call in enumerate(calls) for step in call.steps[:-1]
    )
    endings = {i: call.ending for i, call in enumerate(calls)}
    assert None not in endings.values() and len({e.launch for e in endings.values() if e}) == 1
    sides = [s for i, each in endings.items() if each for s in places.of_all(i, each.sides)]
    ending: Any = endings[0]
    if isinstance(ending, Alignment):
        ending = _all_of(ending, endings, places)
        sides = _multiplying(sides, places, products)
    ending = replace(ending, sides=tuple(sides))
    outputs = [output for call in calls for output in call.outputs]
    outputs += [Output((), torch.float32)] * len(products)
    steps.append(ending.step)
    return Call(places.operands, tuple(outputs), places.workspace_bytes, tuple(steps), ending)


def compile_ahead(calls: Iterable[Iterable[Launch]], index: int) -> None:
    """Has NVRTC begin with what `together` will launch beyond what the calls do by themselves.

    calls: what each may launch (Launching.launches).
    """
    alike = Counter(launch for launches in calls for launch in launches)
    for each in [several_launch(launch) for launch, count in alike.items() if count > 1]:
        if each is not None:
            nvrtc.begin(each.variant, architecture(index))


def _moved(step: Step, i: int, places: _Places) -> Step:
    return step._replace(values=[places.of(i, value) for value in step.values])


def _merged(steps: Iterable[Step]) -> list[Step]:
    """Those of equal launches as one, where the first of them was, if they have a launch for
    several. None of a call reads what another writes, and of its own steps the last alone does."""
    alike: dict[Any, list[Step]] = {}
    for number, step in enumerate(steps):
        alike.setdefault(step.several or number, []).append(step)
    return [_as_one(group) if len(group) > 1 else group[0] for group in alike.values()]


def _as_one(steps: Sequence[Step]) -> Step:
    launch = steps[0].several
    assert launch is not None
    grid = max(step.grid[0] for step in steps), len(steps)
    return Step(launch, grid, in_places([step.values for step in steps]))


def _all_of(ending: Alignment, endings: Mapping[int, Any], places: _Places) -> Alignment:
    """With the thread blocks of the largest, and the sums of columns of all."""
    most = max(each.thread_blocks for each in endings.values())
    sums = [each for i, one in endings.items() for each in places.of_all(i, one.sums)]
    summing = next((each.summing for each in endings.values() if each.summing is not None), None)
    return replace(ending, thread_blocks=most, sums=tuple(sums), summing=summing)


def _multiplying(sides: Sequence[Side], places: _Places, products: Sequence[Product]) -> list[Side]:
    """Sides that make the products, too."""
    sides = list(sides)
    numbers = {side.global_scale: number for number, side in enumerate(sides)}
    for i, (own, other) in enumerate(products):
        at = numbers[places.output(*own)]
        known = isinstance(other, int)
        sides[at] = sides[at]._replace(
            product=places.product(i),
            other=places.other(other) if isinstance(other, int) else 0,
            partner=-1 if known else numbers[places.output(*other)],  # type: ignore[misc]
        )
    return sides


class _Places:
    """Where the tensors of each call are among those of the one for all."""

    def __init__(self, calls: Sequence[Call], products: int, others: int) -> None:
        self._calls = calls
        self._operands = _sums(call.operands for call in calls)
        self.operands = self._operands[-1] + others
        self._outputs = [self.operands + n for n in _sums(len(call.outputs) for call in calls)]
        self._workspace = self._outputs[-1] + products
        parts = (-(-call.workspace // ALIGNMENT) * ALIGNMENT for call in calls)
        *self._parts, self.workspace_bytes = _sums(parts)

    def of(self, i: int, field: Any) -> Any:
        """A field of call i's steps: an At becomes that of the same tensor."""
        if not isinstance(field, At):
            return field
        call, (tensor, past) = self._calls[i], field
        if tensor < call.operands:
            return At(self._operands[i] + tensor, past)
        if tensor < call.operands + len(call.outputs):
            return At(self._outputs[i] + tensor - call.operands, past)
        return At(self._workspace, self._parts[i] + past)

    def of_all(self, i: int, structs: Sequence[Any]) -> list[Any]:
        """The same of structs of fields."""
        return [type(each)(*(self.of(i, field) for field in each)) for each in structs]

    def output(self, i: int, number: int) -> At:
        return At(self._outputs[i] + number)

    def other(self, number: int) -> At:
        return At(self._operands[-1] + number)

    def product(self, number: int) -> At:
        return At(self._outputs[-1] + number)


def _sums(numbers: Any) -> list[int]:
    """0, the first, the first two, ... all."""
    found = [0]
    for number in numbers:
        found.append(found[-1] + number)
    return found
