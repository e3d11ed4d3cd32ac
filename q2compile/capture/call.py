# SPDX-License-Identifier: Apache-2.0
"""A matmul call with its arguments by name, and the graph that it is in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from q2compile.capture.matmul import Matmul, NotTaken, View
from q2compile.graph.views import example, is_view_or_cast, viewed
from q2compile.linear import tensor_parallel
from q2compile.torch_internals.dynamo import parameter_of
from q2compile.torch_internals.fsdp1 import UNSUPPORTED, is_flattened
from q2compile.torch_internals.jagged import ragged_dimension

COMPUTED = "the weight is computed, not a parameter or a view of one"


@dataclass
class Scope:
    """One graph and what its placeholders stand for."""

    gm: fx.GraphModule
    parameters: dict[fx.Node, nn.Parameter] = field(default_factory=dict)
    opaque: str = ""  # why nothing in here can be taken

    def parameter(self, node: object) -> nn.Parameter | None:
        """The parameter that ``node`` is a view or a cast of, None for anything else."""
        while isinstance(node, fx.Node):
            if node.op == "placeholder":
                return self.parameters.get(node)
            if node.op == "get_attr":
                return parameter_of(node)
            if not is_view_or_cast(node):
                return None
            node = viewed(node)
        return None

    def computed_from(self, node: object) -> nn.Parameter | None:
        """The largest weight that ``node`` is computed from, None if an activation takes part."""
        largest, todo, seen = None, [node], {node}
        while todo:
            node = todo.pop()
            parameter = self.parameter(node)
            if parameter is not None:
                if parameter.ndim >= 2 and (largest is None or parameter.numel() > largest.numel()):
                    largest = parameter
                continue
            assert isinstance(node, fx.Node)
            if node.op == "placeholder":
                return None
            todo += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
        return largest


@dataclass(frozen=True)
class Call:
    """A matmul call with its arguments by name."""

    scope: Scope
    node: fx.Node
    spelling: str
    args: dict[str, Any]

    def left(self, why: str, parameter: nn.Parameter | None = None) -> NotTaken:
        return NotTaken(self.scope.gm, self.node, self.spelling, why, parameter)

    def taken(self, parameter: nn.Parameter, x: Any, w: Any, **views: Any) -> Matmul | NotTaken:
        matmul = Matmul(self.scope.gm, self.node, self.spelling, parameter, x, w, **views)
        matmul = _one_expert(matmul) if matmul.is_part and matmul.bias is None else matmul
        why = UNSUPPORTED if is_flattened(parameter) else _unusable(matmul)
        why = why or tensor_parallel.unplanned(*matmul.operands())
        return self.left(why, parameter) if why else matmul

    def no_parameter(self, *operands: Any) -> tuple[str, nn.Parameter | None]:
        """Why a product is left that has no parameter among its operands, and the parameter that
        one of them (the first, if possible) is computed from."""
        for parameter in map(self.scope.computed_from, operands):
            if parameter is not None:
                return COMPUTED, parameter
        return "activation × activation", None

    def weight(self, *, computed: bool = True) -> nn.Parameter | None:
        """The first parameter of two or more dimensions among the arguments; with ``computed``, if
        there is none, the first parameter that an argument is computed from."""
        nodes = [
            a for a in tree_leaves((self.node.args, self.node.kwargs)) if isinstance(a, fx.Node)
        ]
        for find in (self.scope.parameter, self.scope.computed_from)[: 1 + computed]:
            for parameter in map(find, nodes):
                if parameter is not None and parameter.ndim >= 2:
                    return parameter
        return None


def _one_expert(matmul: Matmul) -> Matmul:
    """A product with one matrix of a stack, by the op for a stack. In a loop over experts, one
    expert may have few tokens, and the weight gradient of a plain linear is biased for few tokens.
    """
    x, w, _ = matmul.operands()
    if x.is_nested or isinstance(w, DTensor) or any(n % 16 for n in w.shape):
        return matmul
    one: tuple[View, ...] = (("unsqueeze", (0,)),)
    return replace(
        matmul,
        op="batched_linear",
        x_views=(*matmul.x_views, *one),
        w_views=(*matmul.w_views, *one),
        y_views=(("squeeze", (0,)), *matmul.y_views),
    )


def _unusable(matmul: Matmul) -> str:
    """Why the call's activation and weight can't be operands here; "" if they can."""
    x, w = example(matmul.x), example(matmul.w)
    if w.ndim != 2 and not isinstance(w, DTensor):  # a view may make one dimension of several
        w = matmul.operands()[1]
    if matmul.op == "linear" and w.ndim != 2:
        return f"the weight is {w.ndim}-D, {list(w.shape)}; only 2-D weights are taken"
    for name, t in (("activation", x), ("weight", w)):
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            dtype = str(t.dtype).removeprefix("torch.")
            return f"the {name} is {dtype}; fp32, bf16 and fp16 are taken"
    if x.is_nested and _unusable_jagged(matmul):
        return _unusable_jagged(matmul)
    if matmul.op != "linear":
        return _unusable_experts(matmul.operands()[1])
    if min(tensor_parallel.smallest_part(w)) < 16:
        part = "a rank's part of the weight" if isinstance(w, DTensor) else "the weight"
        shape = list(tensor_parallel.smallest_part(w))
        return f"too small: {part} is {shape}, a block has 16 values"
    return ""


def _unusable_jagged(matmul: Matmul) -> str:
    x = example(matmul.x)
    ragged = ragged_dimension(x)
    if ragged is None:
        return "the activation is a nested tensor whose rows are not contiguous"
    plain = matmul.op == "linear" and not matmul.x_views and not matmul.y_views
    if not plain or ragged == x.ndim - 1:
        return "the activation is a nested tensor, in a form other than F.linear(x, w) and x @ w"
    return ""


def _unusable_experts(w: torch.Tensor) -> str:
    if isinstance(w, DTensor):
        return "the experts' weights are a DTensor: the q2 ops for experts have no sharding rule"
    if w.shape[1] % 16 or w.shape[2] % 16:
        return f"experts of {list(w.shape[1:])}: both sizes must be multiples of 16, a block's size"
    return ""
