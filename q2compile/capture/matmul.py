# SPDX-License-Identifier: Apache-2.0
"""A matmul in a Dynamo graph: activation × parameter in one form, or left in BF16 with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from q2compile.graph.views import example
from q2compile.linear import tensor_parallel

View = tuple[str, tuple[Any, ...]]  # a tensor method and its arguments


@dataclass(frozen=True)
class Matmul:
    """y = y_views(x_views(x) · wᵀ + bias), with w [N, K] after w_views.

    op is the one of q2 that computes it: "linear", or for experts, where w is [E, N, K], one of
    `q2compile.linear.experts`; groups is the third argument of grouped_linear or indexed_linear.
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
            x = x.values() if x.is_nested else x
            for method, args in self.w_views:
                w = getattr(w, method)(*args)
        return x, w, None if self.bias is None else example(self.bias)

    @property
    def is_part(self) -> bool:
        """Whether the weight is one matrix of a stack, for a plain product: an expert's."""
        part = self.parameter.ndim > 2 and example(self.w).numel() < self.parameter.numel()
        return self.op == "linear" and part and example(self.w).ndim == 2

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
class NotTaken:
    """A matmul that is not activation × parameter, or not in a form that can be rewritten.

    unread: reading it raised; ``why`` says what
    """

    gm: fx.GraphModule
    node: fx.Node
    spelling: str
    why: str
    parameter: nn.Parameter | None = None
    unread: bool = False
