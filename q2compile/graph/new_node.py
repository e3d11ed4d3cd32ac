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

from q2compile.torch_internals.inductor import decompositions
from q2compile.torch_internals.private_names import TorchDispatchMode


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
        """The node of a tensor, or of a size that is a symbol; any other value itself."""
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return self._made.get(id(value), (value,))[0] if isinstance(value, torch.Tensor) else value

    def _size(self, size: torch.SymInt) -> fx.Node:
        """A node for the size of a tensor that is in the graph."""
        for node, tensor in list(self._made.values()):
            for dim, of in enumerate(tensor.shape):
                if isinstance(of, torch.SymInt) and of.node.expr == size.node.expr:
                    return self._call(torch.ops.aten.sym_size.int, (node, dim), {}, size)
        raise AssertionError(f"no tensor in the graph has the size {size}")

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
        node = self._call(target, args, kwargs, made)
        self._made[id(made)] = (node, made)
        return node

    def _call(self, target: Any, args: Any, kwargs: Any, made: Any) -> fx.Node:
        name = getattr(target, "overloadpacket", target).__name__
        node = self.like.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {k: v for k, v in self.like.meta.items() if k != "tensor_meta"} | {"val": made}
        self.written.append(node)
        return node


def write(
    like: fx.Node, function: Callable[..., Any], *given: fx.Node
) -> tuple[Any, list[fx.Node]]:
    """Write what ``function`` does with tensors where the graph inserts. Returns its result, with
    nodes in place of tensors, and all new nodes. Nothing is done in place. Sizes are numbers, or
    those of tensors that are given or written.
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
