"""What Inductor works out again for every loop, or every operation of one, though it is known.

A quantiser that is fused with its producer is a dozen loops, so a graph with quantisers has twice
the loops of one without, and what a loop costs the compiler counts twice. Nothing here changes what
is generated, of no graph: what is answered is what Inductor would have found, sooner.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any


@functools.cache
def register() -> None:
    """Spare the Inductor of this process all of it. One that is not built so works as it does."""
    for spare in (
        _make_dtype_rules_once,
        _look_for_no_symbols_in_static_graphs,
        _keep_bounds_that_are_the_same,
        _unite_sets_as_dicts,
    ):
        with suppress(ImportError, AttributeError):
            spare()


def _make_dtype_rules_once() -> None:
    """Of torch 2.11 to 2.15 DtypePropagationOpsHandler is a singleton, but its __init__ runs each
    time it is asked for, once for every operation of a kernel, and makes the rules of all (50 us).
    pytorch/pytorch#192820 mends that as it is mended here: rules are made when there are new ones.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules

    make = DtypePropagationOpsHandler.__init__
    made: list[Any] = [None, None]  # the singleton, and the rules that it knows

    @functools.wraps(make)
    def make_new_ones(self: Any) -> None:
        if made[0] is not self or made[1] != op_dtype_propagation_rules:
            make(self)
            made[:] = self, dict(op_dtype_propagation_rules)

    DtypePropagationOpsHandler.__init__ = make_new_ones  # type: ignore[method-assign]


def _look_for_no_symbols_in_static_graphs() -> None:
    """Before it fuses loops, and where it cuts a graph into partitions, Inductor traces each loop
    two times more, for the symbols in it: those of unknown or of symbolic sizes, all others are
    dropped. Where the graph has no such size there are none to be found.
    """
    from torch._inductor.ir import ComputedBuffer
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    find = ComputedBuffer.get_free_symbol_uses

    @functools.wraps(find)
    def find_in_dynamic_graphs(self: Any, unbacked_only: bool = False) -> Any:
        if V.graph.sizevars.shape_env.var_to_range:
            return find(self, unbacked_only)
        return OrderedSet()

    ComputedBuffer.get_free_symbol_uses = find_in_dynamic_graphs  # type: ignore[method-assign]


def _keep_bounds_that_are_the_same() -> None:
    """Each time that an operation of a kernel is one that it has already, a constant most often,
    Inductor intersects what is known of the bounds of the one with those of the other, by Max and
    Min of sympy (71 us). Where both are the same, so is what they have in common.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    intersect = ValueRanges.__and__

    @functools.wraps(intersect)
    def intersect_others(self: Any, other: Any) -> Any:
        return self if self == other else intersect(self, other)

    ValueRanges.__and__ = intersect_others  # type: ignore[method-assign]


def _unite_sets_as_dicts() -> None:
    """The scheduler unites all operations before a loop with all that are done, for every loop: the
    work is quadratic in the number of layers, and Python's of each element, since the union of
    OrderedSet is the one that collections.abc has for all sets. It is that of its two dicts.
    """
    from torch.utils._ordered_set import OrderedSet

    unite, of_dict = OrderedSet.__or__, OrderedSet._from_dict

    @functools.wraps(unite)
    def unite_dicts(self: Any, other: Any) -> Any:
        if type(self) is type(other) is OrderedSet:
            return of_dict({**self._dict, **other._dict})
        return unite(self, other)

    OrderedSet.__or__ = unite_dicts  # type: ignore[method-assign]
