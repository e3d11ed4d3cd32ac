# SPDX-License-Identifier: Apache-2.0
"""Replacements for what Inductor works out again for every kernel, or every operation of one.

A quantizer that fuses with its producer is a dozen of Inductor's kernels. So a graph with
quantizers has twice the kernels of one without, and what a kernel costs the compiler counts twice.
Nothing here changes generated code: the answer is the one that Inductor would have found, sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from q2compile.torch_internals.patches import replaces


@replaces("dtype_rules")
def _make_dtype_rules_once(make: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor.utils import op_dtype_propagation_rules

    made: list[Any] = [None, None]  # the singleton, and the rules that it knows

    def make_new_ones(self: Any) -> None:
        if made[0] is not self or made[1] != op_dtype_propagation_rules:
            make(self)
            made[:] = self, dict(op_dtype_propagation_rules)

    return make_new_ones


@replaces("free_symbols")
def _look_for_no_symbols_in_static_graphs(find: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    def find_in_dynamic_graphs(self: Any, unbacked_only: bool = False) -> Any:
        if V.graph.sizevars.shape_env.var_to_range:
            return find(self, unbacked_only)
        return OrderedSet()

    return find_in_dynamic_graphs


@replaces("bounds")
def _keep_equal_bounds(intersect: Callable[..., Any]) -> Callable[..., Any]:
    def intersect_others(self: Any, other: Any) -> Any:
        return self if self == other else intersect(self, other)

    return intersect_others


@replaces("sets")
def _unite_sets_as_dicts(unite: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils._ordered_set import OrderedSet

    of_dict = OrderedSet._from_dict

    def unite_dicts(self: Any, other: Any) -> Any:
        if type(self) is type(other) is OrderedSet:
            return of_dict({**self._dict, **other._dict})
        return unite(self, other)

    return unite_dicts
