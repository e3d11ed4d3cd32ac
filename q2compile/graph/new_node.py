# SPDX-License-Identifier: Apache-2.0
"""Nodes that a pass puts into a graph, with the fakes of what they are given."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from q2compile.graph.nodes import values


def new_node(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call where the graph inserts, with what is noted of another node: its place in the model,
    and in forward or backward."""
    name = getattr(target, "overloadpacket", target).__name__  # as AOTAutograd names them
    node = like.graph.create_node("call_function", target, args, kwargs, name)
    fakes, named = values((args, kwargs))
    dropped = ("val", "tensor_meta")
    node.meta = {k: v for k, v in like.meta.items() if k not in dropped}
    modes = (getattr(value, "fake_mode", None) for value in tree_leaves(like.meta["val"]))
    with next((mode for mode in modes if mode is not None), nullcontext()):
        node.meta["val"] = target(*fakes, **named)
    return node


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
