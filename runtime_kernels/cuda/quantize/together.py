"""Calls of quantisers that end in one launch, which also multiplies their global scales.

apart      rotate x, align x, rotate w, align w, product of the global scales, GEMM
together   rotate x, rotate w, align both and multiply their global scales, GEMM
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.calls import At, Call, Output
from q2compile.runtime_kernels.cuda.quantize.align_scales import Alignment, Side, Sums

_ALIGNMENT = 16  # bytes, of each call's part of the workspace


class Product(NamedTuple):
    """Of the global scales of two operands of a GEMM.

    own: the call, by number, that makes the one, and which of its outputs that is.
    other: the same of the other; or where that is known, its number among the other tensors.
    """

    own: tuple[int, int]
    other: tuple[int, int] | int


def together(calls: Sequence[Call], products: Sequence[Product] = (), others: int = 0) -> Call:
    """One call for several, whose alignments have one launch.

    Its operands are those of all, then `others` tensors, each one fp32; its outputs are those of
    all, then the products.
    """
    places = _Places(calls, len(products), others)
    steps = [
        step._replace(values=[places.of(i, value) for value in step.values])
        for i, call in enumerate(calls)
        for step in call.steps[:-1]
    ]
    alignments: list[Alignment] = [call.alignment for call in calls]
    assert len({alignment.launch for alignment in alignments}) == 1
    sides = [
        Side(*(places.of(i, field) for field in side))
        for i, alignment in enumerate(alignments)
        for side in alignment.sides
    ]
    sums = [
        Sums(*(places.of(i, field) for field in each))
        for i, alignment in enumerate(alignments)
        for each in alignment.sums
    ]
    summing = next((a.summing for a in alignments if a.summing is not None), None)
    numbers = {side.global_scale: number for number, side in enumerate(sides)}
    for i, (own, other) in enumerate(products):
        at = numbers[places.output(*own)]
        known = isinstance(other, int)
        sides[at] = sides[at]._replace(
            product=places.product(i),
            other=places.other(other) if isinstance(other, int) else 0,
            partner=-1 if known else numbers[places.output(*other)],  # type: ignore[misc]
        )
    most = max(alignment.thread_blocks for alignment in alignments)
    alignment = Alignment(alignments[0].launch, tuple(sides), most, tuple(sums), summing)
    outputs = [output for call in calls for output in call.outputs]
    outputs += [Output((), torch.float32)] * len(products)
    return Call(
        places.operands,
        tuple(outputs),
        places.workspace_bytes,
        (*steps, alignment.step),
        alignment,
    )


class _Places:
    """Where the tensors of each call are among those of the one for all."""

    def __init__(self, calls: Sequence[Call], products: int, others: int) -> None:
        self._calls = calls
        self._operands = _sums(call.operands for call in calls)
        self.operands = self._operands[-1] + others
        self._outputs = [self.operands + n for n in _sums(len(call.outputs) for call in calls)]
        self._workspace = self._outputs[-1] + products
        parts = (-(-call.workspace // _ALIGNMENT) * _ALIGNMENT for call in calls)
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
