# SPDX-License-Identifier: Apache-2.0
"""Which quantizers share launches. The pass group_launches writes that into the graph; the lowering
may split a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from q2compile.runtime_kernels.cuda.calls import MOST_OPERANDS
from q2compile.runtime_kernels.cuda.jit.launch import Launch

T = TypeVar("T")


class Tail(NamedTuple):
    """The last launch of a quantizer.

    launch    the kernel, if it can serve other quantizers, too; else None
    operands  the number of this quantizer's operands that it works on
    """

    launch: Launch | None
    operands: int


def can_share(tails: Sequence[Tail]) -> bool:
    """Whether adjacent quantizers can share their last launch: the same kernel, with room for all
    of their operands."""
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
