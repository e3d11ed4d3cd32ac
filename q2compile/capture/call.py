"""What a matmul in a Dynamo graph is: activation × parameter in one form, or left with a reason."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from q2compile import tensor_parallel

aten = torch.ops.aten

View = tuple[str, tuple[Any, ...]]  # a tensor method and its arguments


@dataclass(frozen=True)
class Matmul:
    """y = y_views(x_views(x) · wᵀ + bias), with w [N, K] after w_views.

    op is the one of q2 that computes it: "linear", or for experts, where w is [E, N, K], one of
    `q2compile.experts`; groups is the third argument of grouped_linear or indexed_linear.
    """

    gm: fx.GraphModule
    node: fx.Node
    spelling: str
    parameter: nn.Parameter
    x: fx.Node
    w: fx.Node
    bias: fx.Node | None = None
    x_views: tuple[View, ...] = ()
    w_views: tuple[View, ...] = ()
    y_views: tuple[View, ...] = ()
    op: str = "linear"
    groups: fx.Node | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Fake tensors for x [..., K], w [..., N, K] and bias, after their views."""
        x, w = example(self.x), example(self.w)
        with torch.no_grad():
            for method, args in self.x_views:
                x = getattr(x, method)(*args)
            for method, args in self.w_views:
                w = getattr(w, method)(*args)
        return x, w, None if self.bias is None else example(self.bias)

    @property
    def stacked(self) -> bool:
        """Whether the weight is a stack of matrices, or one of a stack: experts."""
        part = self.parameter.ndim > 2 and example(self.w).numel() < self.parameter.numel()
        return self.op != "linear" or part

    @property
    def shape(self) -> tuple[Any, ...]:
        """(T, N, K), this rank's part where w is a DTensor; (E, T, N, K) for E experts, with T the
        rows of all. T may be symbolic.
        """
        x, w, _ = self.operands()
        if isinstance(w, DTensor):
            assert isinstance(x, DTensor), "tensor_parallel.unplanned has left any other"
            return tensor_parallel.local_sizes(x, w)
        *experts, n, k = w.shape
        return *experts, x.numel() // max(k, 1), n, k


@dataclass(frozen=True)
class Left:
    """A matmul that is not activation × parameter, or not in a form that can be rewritten."""

    gm: fx.GraphModule
    node: fx.Node
    spelling: str
    why: str
    parameter: nn.Parameter | None = None

    @property
    def stacked(self) -> bool:
        """Whether the weight has more than two dimensions."""
        return self.parameter is not None and self.parameter.ndim > 2


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
                value = attribute(self.gm, str(node.target))
                return value if isinstance(value, nn.Parameter) else None
            if not is_view_or_cast(node):
                return None
            node = node.args[0] if node.args else node.kwargs.get("input")
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


# Methods and functions with one tensor input whose result is that tensor, seen or stored otherwise.
_VIEW_METHODS = frozenset(
    ["t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "mT", "T"]
    + ["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "detach"]
    + ["narrow", "chunk", "split", "unbind", "select", "clone"]
    + ["to", "type", "type_as", "bfloat16", "half", "float", "double", "cpu", "cuda"]
)
_VIEW_FUNCTIONS = frozenset(
    [torch.t, torch.transpose, torch.permute, torch.swapaxes, torch.movedim, torch.reshape]
    + [torch.chunk, torch.split, torch.narrow, torch.unbind, torch.squeeze, torch.unsqueeze]
    + [torch.detach, torch.clone, operator.getitem]
    + [aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default]
    + [aten.split.Tensor, aten.slice.Tensor, aten._to_copy.default, aten.to.dtype]
    + [aten.chunk.default, aten.split_with_sizes.default, aten.reshape.default, aten.detach.default]
)


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether ``node`` is its first argument, seen or stored otherwise."""
    if node.op == "call_method":
        return node.target in _VIEW_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("T", "mT", "H", "mH", "data")
    if node.target is operator.getitem:  # rows chosen by a tensor are a look-up: an activation
        return not any(isinstance(i, fx.Node) and _is_tensor(i) for i in tree_leaves(node.args[1]))
    return node.target in _VIEW_FUNCTIONS


def transposes(node: fx.Node) -> bool:
    """Whether ``node`` swaps the last two dimensions of its first argument."""
    n = example(node).ndim
    target = node.args[1] if node.target is getattr else node.target
    if target in ("t", torch.t, "T", "mT"):
        return n == 2 or target == "mT"
    dims = {a % n for a in node.args[1:] if isinstance(a, int)}
    return target in (torch.transpose, "transpose") and dims == {n - 2, n - 1}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value", node.meta.get("val")), torch.Tensor)


def example(node: Any) -> torch.Tensor:
    """The fake tensor that Dynamo, or a trace, saw at this node."""
    value = node.meta.get("example_value", node.meta.get("val"))
    assert isinstance(value, torch.Tensor), f"{node} carries no example tensor"
    return value


def attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


@dataclass(frozen=True)
class Call:
    """A matmul call with its arguments by name."""

    scope: Scope
    node: fx.Node
    spelling: str
    args: dict[str, Any]

    def left(self, why: str, parameter: nn.Parameter | None = None) -> Left:
        return Left(self.scope.gm, self.node, self.spelling, why, parameter)

    def taken(self, parameter: nn.Parameter, x: Any, w: Any, **views: Any) -> Matmul | Left:
        matmul = Matmul(self.scope.gm, self.node, self.spelling, parameter, x, w, **views)
        why = _unusable(matmul) or tensor_parallel.unplanned(*matmul.operands())
        return self.left(why, parameter) if why else matmul

    def weight(self) -> nn.Parameter | None:
        """The first parameter of two or more dimensions among the arguments."""
        for argument in tree_leaves((self.node.args, self.node.kwargs)):
            parameter = self.scope.parameter(argument)
            if parameter is not None and parameter.ndim >= 2:
                return parameter
        return None


def _unusable(matmul: Matmul) -> str:
    """Why its activation and weight can't be operands here; "" if they can."""
    x, w = example(matmul.x), example(matmul.w)
    if matmul.op == "linear" and w.ndim != 2:
        return f"the weight is {w.ndim}-D, {list(w.shape)}; only 2-D weights are taken"
    for name, t in (("activation", x), ("weight", w)):
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            dtype = str(t.dtype).removeprefix("torch.")
            return f"the {name} is {dtype}; fp32, bf16 and fp16 are taken"
    if matmul.op != "linear":
        return _unusable_experts(*matmul.operands()[:2], matmul.op)
    if min(tensor_parallel.smallest_part(w)) < 16:
        part = "a rank's part of the weight" if isinstance(w, DTensor) else "the weight"
        shape = list(tensor_parallel.smallest_part(w))
        return f"too small: {part} is {shape}, a block has 16 values"
    return ""


def _unusable_experts(x: torch.Tensor, w: torch.Tensor, op: str) -> str:
    if isinstance(w, DTensor):
        return "the experts' weights are a DTensor: the q2 ops for experts have no sharding rule"
    if w.shape[1] % 16 or w.shape[2] % 16:
        return f"experts of {list(w.shape[1:])}: both sizes must be multiples of 16, a block"
    if op == "batched_linear" and str(x.shape[0]) != str(w.shape[0]):
        return (
            f"{x.shape[0]} activation(s) for {w.shape[0]} experts: einsum broadcasts, q2 does not"
        )
    return ""
