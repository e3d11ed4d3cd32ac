# SPDX-License-Identifier: Apache-2.0
"""Which matmul is a router: one whose result chooses experts."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from q2compile.capture.matmul import Matmul, NotTaken
from q2compile.graph.views import called, is_view_or_cast

_MOST_EXPERTS = 1024  # a head has more outputs, also where tokens are drawn from its top ones
# Ops between the logits and the choice of experts: scores, and a bias that balances the load.
_aten = torch.ops.aten
_BETWEEN = frozenset(
    [torch.softmax, torch.sigmoid, torch.add, torch.mul, torch.div, F.softmax, F.softplus]
    + [operator.add, operator.mul, operator.truediv, torch.sqrt, F.sigmoid, F.log_softmax]
    + [_aten._softmax, _aten.softmax, _aten.sigmoid, _aten.add, _aten.mul, _aten.div]
    + ["softmax", "sigmoid", "add", "mul", "div", "sqrt"]
)
_CHOICES = (torch.topk, "topk", _aten.topk)


def _experts(found: Matmul | NotTaken) -> int:
    """How many experts it may choose from: the weight's rows, or its smaller size if it is left."""
    if isinstance(found, Matmul):
        _, w, _ = found.operands()
        return int(w.shape[-2])
    assert found.parameter is not None
    return min(found.parameter.shape)


def is_router(found: Matmul | NotTaken) -> bool:
    """Whether the result, or scores made of it alone, goes into a topk: over the experts of each
    token, or over the tokens of each expert.
    """
    parameter = found.parameter
    if parameter is None or parameter.ndim != 2 or _experts(found) > _MOST_EXPERTS:
        return False
    todo: list[fx.Node] = [found.node]
    seen = set(todo)
    while todo:
        for user in todo.pop().users:
            if called(user) in _CHOICES:
                return True
            if user not in seen and (called(user) in _BETWEEN or is_view_or_cast(user)):
                seen.add(user)
                todo.append(user)
    return False
