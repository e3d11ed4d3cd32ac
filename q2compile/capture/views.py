# SPDX-License-Identifier: Apache-2.0
"""Which nodes are views or casts of their first argument."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from q2compile.torch_internals.dynamo import attribute_read, dtensor_method, is_gather

aten = torch.ops.aten

# Methods and functions with one tensor input whose result is that tensor, seen or stored otherwise.
# An op of aten is here without its overloads.
_VIEW_METHODS = frozenset(
    ["t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "mT", "T"]
    + ["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "detach"]
    + ["narrow", "chunk", "split", "unbind", "select", "clone"]
    + ["to", "type", "type_as", "bfloat16", "half", "float", "double", "cpu", "cuda"]
)
_VIEW_FUNCTIONS = frozenset(
    [torch.t, torch.transpose, torch.permute, torch.swapaxes, torch.swapdims, torch.movedim]
    + [torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze]
    + [torch.narrow, torch.chunk, torch.split, torch.Tensor.split, torch.unbind, torch.select]
    + [torch.detach, torch.clone, operator.getitem]
    + [aten.t, aten.transpose, aten.permute, aten.view, aten.reshape, aten.split, aten.chunk]
    + [aten.split_with_sizes, aten.slice, aten._to_copy, aten.to, aten.detach]
)
_TRANSPOSES = frozenset(
    ["t", "transpose", "swapaxes", "swapdims", "T", "mT", aten.t, aten.transpose]
    + [torch.t, torch.transpose, torch.swapaxes, torch.swapdims]
)


def called(node: fx.Node) -> Any:
    """The target of ``node``; for an op of aten its packet, since the arguments decide the
    overload."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return node.target.overloadpacket
    return node.target


def argument(node: fx.Node, place: int, *names: str) -> Any:
    """An argument of a call by its place or by the first of its names that was given, or None."""
    if place < len(node.args):
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def viewed(node: fx.Node) -> Any:
    """The tensor that a view, a cast or a look-up reads, by place or by torch's name for it."""
    return argument(node, 0, "input", "self", "tensor")


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether ``node`` is a view or a cast of its first argument."""
    if node.op not in ("call_method", "call_function"):
        return False
    if dtensor_method(node):  # its part on this rank, or all of it
        return True
    if node.op == "call_method":
        return node.target in _VIEW_METHODS
    if attribute_read(node) in ("T", "mT", "H", "mH", "data"):
        return True
    if node.target is operator.getitem:  # rows chosen by a tensor are a look-up: an activation
        return not any(isinstance(i, fx.Node) and _is_tensor(i) for i in tree_leaves(node.args[1]))
    return called(node) in _VIEW_FUNCTIONS or is_gather(node)


def transposes(node: fx.Node) -> bool:
    """Whether ``node`` swaps the last two dimensions of its first argument."""
    n = example(node).ndim
    target = attribute_read(node) or called(node)
    if target not in _TRANSPOSES:
        return False
    dims = [argument(node, i + 1, f"dim{i}", f"axis{i}") for i in (0, 1)]
    if all(isinstance(d, int) for d in dims):
        return {d % n for d in dims} == {n - 2, n - 1}
    return n == 2 or target == "mT"


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value", node.meta.get("val")), torch.Tensor)


def example(node: Any) -> torch.Tensor:
    """The fake tensor that Dynamo, or a trace, saw at this node."""
    value = node.meta.get("example_value", node.meta.get("val"))
    assert isinstance(value, torch.Tensor), f"{node} carries no example tensor"
    return value
