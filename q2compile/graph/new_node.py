# SPDX-License-Identifier: Apache-2.0
"""Nodes that a pass puts into a graph, with the fakes of what they are given."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from q2compile.graph.nodes import values
from q2compile.torch_internals.inductor import decompositions
from q2compile.torch_internals.private_names import TorchDispatchMode


def new_node(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call where the graph inserts, with what is noted of another node: its place in the model,
    and in forward or backward."""
    name = getattr(target, "overloadpacket", target).__name__  # as AOTAutograd names them
    node = like.graph.create_node("call_function", target, args, kwargs, name)
    fakes, named = values((args, kwargs))
    dropped = ("val", "tensor_meta")
    node.meta = {k: v for k, v in like.meta.items() if k not in dropped}
    with _fake_mode(like):
        node.meta["val"] = target(*fakes, **named)
    return node


def _fake_mode(like: fx.Node) -> Any:
    modes = (getattr(value, "fake_mode", None) for value in tree_leaves(like.meta["val"]))
    return next((mode for mode in modes if mode is not None), nullcontext())


class _Writer(TorchDispatchMode):
    """Writes what is called inside of it into a graph, decomposed as Inductor decomposes. It is of
    one thread. `make_fx` is not: it marks the whole process as tracing, and torch.compile refuses
    to run in any thread then, unless Dynamo is compiling."""

    def __init__(self, like: fx.Node, given: tuple[fx.Node, ...]) -> None:
        super().__init__()
        self.like, self.written = like, list[fx.Node]()
        self._made = {id(node.meta["val"]): (node, node.meta["val"]) for node in given}

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; any other value itself."""
        return self._made.get(id(value), (value,))[0] if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # an attribute of a tensor
            return func(*args, **kwargs)
        with self:
            made = decompositions().get(func, func.decompose)(*args, **kwargs)
        if made is not NotImplemented:
            return made
        made = func(*args, **kwargs)
        if func is torch.ops.aten.alias.default:  # what autograd makes of a view
            self._made[id(made)] = (self.node_of(args[0]), made)
            return made
        args, kwargs = tree_map(self.node_of, (args, kwargs))
        node = self._write(func, args, kwargs, made)
        for i, one in enumerate(made if isinstance(made, list | tuple) else ()):
            self._write(operator.getitem, (node, i), {}, one)
        return made

    def _write(self, target: Any, args: Any, kwargs: Any, made: Any) -> fx.Node:
        name = getattr(target, "overloadpacket", target).__name__
        node = self.like.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {k: v for k, v in self.like.meta.items() if k != "tensor_meta"} | {"val": made}
        self._made[id(made)] = (node, made)
        self.written.append(node)
        return node


def write(
    like: fx.Node, function: Callable[..., Any], *given: fx.Node
) -> tuple[Any, list[fx.Node]]:
    """Write what ``function`` does with tensors where the graph inserts. Returns its result, with
    nodes in place of tensors, and all new nodes. Sizes are numbers, and nothing is done in place.
    """
    writer = _Writer(like, given)
    with torch.no_grad(), _fake_mode(like), writer:
        result = function(*(node.meta["val"] for node in given))
    results = tree_map(writer.node_of, result)
    read = set(tree_leaves(results))
    for node in reversed(writer.written):
        if not node.users and node not in read and not node.is_impure():
            like.graph.erase_node(node)
    return results, [node for node in writer.written if not node._erased]


def new_constant(
    like: fx.Node, size: list[Any], value: Any, of: fx.Node, dtype: torch.dtype | None = None
) -> fx.Node:
    """A tensor of one value, where `of` is, of its type or another."""
    fake = of.meta["val"]
    return new_node(
        *(like, torch.ops.aten.full.default, size, value),
        dtype=dtype or fake.dtype,
        layout=torch.strided,
        device=fake.device,
        pin_memory=False,
    )


def new_size(like: fx.Node, of: fx.Node) -> Any:
    """How many rows a tensor has: a number, or a node."""
    size = of.meta["val"].shape[0]
    return size if isinstance(size, int) else new_node(like, torch.ops.aten.sym_size.int, of, 0)
