# SPDX-License-Identifier: Apache-2.0
"""The table of views and casts: ops whose result is a view or a cast of their first argument.

It serves Dynamo's graphs, whose nodes call methods and functions of torch, and AOTAutograd's, whose
nodes call overloads of aten and prims. No other file lists such ops. A caller names the kinds that
it sees through, and its docstring says why it leaves out the others:

    if kind_of(node) & (VIEWS | CAST):
        node = viewed(node)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from q2compile.torch_internals.dynamo import attribute_read, dtensor_method, is_gather

_aten, _prims = torch.ops.aten, torch.ops.prims


# Kinds of views and casts, by what the result has in common with the first argument; bits, so that
# `|` joins kinds.
#
# RESHAPE  the elements in their order, under other sizes
# PERMUTE  the elements, with the dimensions in another order
# UNIT     the elements in their order; dimensions of size 1 are added or dropped
# REPEAT   the elements, each any number of times. A parameter behind one is not a weight of as many
#          elements, so capture does not see through it.
# ALIAS    everything
# COPY     everything but the memory, which has to be written. A pass that moves or recomputes views
#          leaves copies where they are.
# CAST     the elements, rounded to another type
# BITS     the memory, read as another type
# PART     a part of the elements
# SPLIT    a tuple of parts, which together are all elements
# ITEM     one output of several; in Dynamo's graphs also a part of a tensor
RESHAPE, PERMUTE, UNIT, REPEAT, ALIAS, COPY, CAST, BITS, PART, SPLIT, ITEM = (
    1 << i for i in range(11)
)
# Views of all elements. They neither compute nor write anything.
VIEWS = RESHAPE | PERMUTE | UNIT | REPEAT | ALIAS
# Each element is computed from one.
ELEMENTS = VIEWS | COPY | CAST | BITS

# Each name is that of a method or an attribute of a tensor, and of functions of torch and aten, if
# these have it.
_NAMES = {
    RESHAPE: ("view", "reshape", "_unsafe_view", "flatten", "unflatten"),
    PERMUTE: ("t", "transpose", "permute", "swapaxes", "swapdims", "movedim")
    + ("T", "mT", "H", "mH"),
    UNIT: ("squeeze", "unsqueeze"),
    REPEAT: ("expand",),
    ALIAS: ("alias", "detach", "data"),
    COPY: ("clone", "contiguous"),
    CAST: ("to", "type", "type_as", "bfloat16", "half", "float", "double", "cpu", "cuda")
    + ("_to_copy",),
    PART: ("narrow", "select", "slice"),
    SPLIT: ("split", "split_with_sizes", "chunk", "unbind"),
}


def _spellings(name: str) -> Iterator[Any]:
    yield name
    for namespace in (torch, torch.Tensor, _aten):
        function = getattr(namespace, name, None)
        if callable(function):
            yield function


# The target of a node, an op of aten or prims without its overload -> (name, kind).
_TABLE: dict[Any, tuple[str, int]] = {
    spelling: (name, kind)
    for kind, names in _NAMES.items()
    for name in names
    for spelling in _spellings(name)
} | {
    operator.getitem: ("getitem", ITEM),
    _prims.convert_element_type: ("convert_element_type", CAST),
}


def called(node: fx.Node) -> Any:
    """The target of ``node``; for an op of aten or prims its packet, since the arguments decide the
    overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return target.overloadpacket
    return target


def _row(node: fx.Node) -> tuple[str, int]:
    if node.op not in ("call_method", "call_function"):
        return "", 0
    if node.target is _aten.view.dtype:
        return "view", BITS
    return _TABLE.get(attribute_read(node) or called(node), ("", 0))


def kind_of(node: fx.Node) -> int:
    """Which kind of view or cast ``node`` is; 0 if it is neither."""
    return _row(node)[1]


def argument(node: fx.Node, place: int, *names: str) -> Any:
    """An argument of a call by its place or by the first of its names that was given, or None."""
    if place < len(node.args):
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def viewed(node: fx.Node) -> Any:
    """The tensor that a view, a cast or a look-up reads, by place or by torch's name for it."""
    return argument(node, 0, "input", "self", "tensor")


def behind(node: Any, kinds: int = VIEWS) -> Any:
    """The first node that is none of these kinds, on the way from ``node`` to what it views."""
    while kind_of(node) & kinds:
        node = node.args[0]
    return node


def readers(node: fx.Node, kinds: int = VIEWS) -> Iterator[fx.Node]:
    """The nodes that read ``node``, directly or through these kinds."""
    for user in node.users:
        if kind_of(user) & kinds:
            yield from readers(user, kinds)
        else:
            yield user


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether ``node``, of a Dynamo graph, is a tensor of its first argument's elements, or all
    ranks' parts of one. Nothing else is done to a parameter before a matmul that is taken."""
    if dtensor_method(node) or is_gather(node):
        return True
    kind = kind_of(node)
    if kind == ITEM:  # rows chosen by a tensor are a look-up: an activation
        return not any(isinstance(i, fx.Node) and _is_tensor(i) for i in tree_leaves(node.args[1]))
    return bool(kind & ~REPEAT)


def transposes(node: fx.Node) -> bool:
    """Whether ``node`` swaps the last two dimensions of its first argument and leaves the others.
    H and mH do not count: they are for complex numbers."""
    name, kind = _row(node)
    if kind != PERMUTE:
        return False
    n = example(node).ndim
    if name == "permute":
        dims: Any = argument(node, 1, "dims")
        dims = dims if isinstance(dims, list | tuple) else node.args[1:]
        return [d % n for d in dims] == [*range(n - 2), n - 1, n - 2]
    dims = [argument(node, i + 1, f"dim{i}", f"axis{i}") for i in (0, 1)]
    if name in ("transpose", "swapaxes", "swapdims"):
        return {d % n for d in dims} == {n - 2, n - 1}
    return name == "mT" or name in ("t", "T") and n == 2


def is_pointwise(node: fx.Node) -> bool:
    """Whether ``node`` computes each element from the elements at its place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value", node.meta.get("val")), torch.Tensor)


def example(node: Any) -> torch.Tensor:
    """The fake tensor that Dynamo, or a trace, saw at this node."""
    value = node.meta.get("example_value", node.meta.get("val"))
    assert isinstance(value, torch.Tensor), f"{node} carries no example tensor"
    return value
