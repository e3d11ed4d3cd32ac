# SPDX-License-Identifier: Apache-2.0
"""Functions that the files of `reproducer` call: a graph built line by line, and the stages to run
on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

import q2compile.linear.dense  # noqa: F401  registers the ops
from q2compile.torch_internals.private_names import FakeTensorMode


@dataclass(frozen=True)
class Tensor:
    """Metadata of a tensor; `make` returns one with random values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    device: str
    requires_grad: bool

    def make(self) -> torch.Tensor:
        stride = torch.empty(self.shape, device="meta").stride()
        made = torch.empty_strided(
            self.shape, self.stride or stride, dtype=self.dtype, device=self.device
        )
        is_wide_float = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return (made.normal_() if is_wide_float else made.zero_()).requires_grad_(
            self.requires_grad
        )


def tensor(
    dtype: torch.dtype,
    *shape: int,
    stride: tuple[int, ...] | None = None,
    device: str = "cpu",
    requires_grad: bool = False,
) -> Tensor:
    return Tensor(dtype, shape, stride, device, requires_grad)


class Replay:
    """An FX graph under construction. Every method that adds a node returns it.

    custom: q2compile's notes on the nodes that are added next.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._mode = FakeTensorMode()
        self._inputs: list[Any] = []
        self.custom: Mapping[str, Any] = {}

    def _add(self, node: fx.Node, value: Any) -> fx.Node:
        with self._mode:
            fake = tree_map_only(Tensor, Tensor.make, value)
        node.meta = {"val": fake, "example_value": fake, "custom": dict(self.custom)}
        return node

    def input(self, name: str, value: Any, parameter: str | None = None) -> fx.Node:
        """Add an input. parameter: the input is one, and this is its name."""
        node = self._add(self._graph.placeholder(name), value)
        made = tree_map_only(Tensor, Tensor.make, value)
        if parameter is not None:
            made = nn.Parameter(made.detach(), made.requires_grad)
            source = SimpleNamespace(name=f"L['self'].{parameter}")
            node.meta["grapharg"] = SimpleNamespace(example=made, source=source)  # as Dynamo's
        self._inputs.append(made)
        return node

    def call(self, name: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        return self._add(node, value)

    def method(self, name: str, target: str, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self._graph.create_node("call_method", target, args, kwargs, name)
        return self._add(node, value)

    def attribute(self, name: str, value: Any) -> fx.Node:
        """Add a graph that this one calls, or a constant tensor."""
        setattr(self._root, name, value.make() if isinstance(value, Tensor) else value)
        node = self._graph.create_node("get_attr", name, name=name)
        return self._add(node, value if isinstance(value, Tensor) else None)

    def output(self, value: Any) -> fx.Node:
        return self._graph.output(value)

    def module(self) -> fx.GraphModule:
        """The graph built so far."""
        return fx.GraphModule(self._root, self._graph)

    def rewrite(self, options: Mapping[str, Any]) -> fx.GraphModule:
        """Rewrites the graph, one of Dynamo's, as the backend does, and returns it."""
        from q2compile.capture.inline_attention import inline_attention
        from q2compile.capture.module_names import Names
        from q2compile.config import Config
        from q2compile.rewrite.rewrite_graph import rewrite

        gm = self.module()
        names = Names.of_graph(gm)
        inline_attention(gm)
        rewrite(gm, Config(**options), names)
        return gm

    def passes(self, kind: str, options: Mapping[str, Any]) -> fx.GraphModule:
        """Runs the passes over a "joint", "forward" or "backward" graph, and returns it."""
        from q2compile.compiler.joint_passes import JointPasses
        from q2compile.compiler.post_grad_passes import PostGradPasses
        from q2compile.config import Config

        gm, config = self.module(), Config(**options)
        runner = JointPasses(config, []) if kind == "joint" else PostGradPasses(config)
        runner.run(gm.graph, kind)
        return gm

    def compile(self, options: Mapping[str, Any]) -> Any:
        """Compiles the graph, one of Dynamo's, and runs it forward and backward. Returns its
        outputs."""
        from q2compile.backend import quartet2

        outputs = quartet2(self.module(), self._inputs, options=options)(*self._inputs)
        loss = sum(o.sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad)
        if isinstance(loss, torch.Tensor):
            loss.backward()
        return outputs
