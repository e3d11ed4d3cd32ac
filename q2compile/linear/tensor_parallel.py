# SPDX-License-Identifier: Apache-2.0
"""`q2::linear` on DTensors: tensor, sequence and data parallel layers, each rank its own part.

Shapes: x [..., K], w [N, K], bias [N], y [..., N] are the whole tensors; every rank computes the
same local linear of its own shards, with quantizers that see nothing but them (amax, where a recipe
takes one, is the shard's). Each dimension of the device mesh follows the row of its w and x:

    w          x             y            grad of x    of w       of bias
    Shard(0)   Replicate     Shard(last)  Partial      Shard(0)   Shard(0)    column-wise
    Shard(1)   Shard(last)   Partial      Shard(last)  Shard(1)   Replicate   row-wise
    Replicate  Shard(other)  as x         as x         Partial    Partial     batch or sequence
    Replicate  Replicate     Replicate    Replicate    Replicate  Replicate   redundant

For a sharded w, an x that is placed otherwise is first brought to its row's placement, which takes
the collectives that torch's own linear would. Where w is replicated nothing moves. A rewrite to the
quantized linear therefore adds no collective.

Random bits come from each rank's default generator and are never keyed by rank. Ranks that compute
the same (the last row, or equal bits of dy anywhere) must draw the same, or their copies of a
parameter drift apart: seed the ranks of one tensor-parallel group alike, as dropout there needs
too. Between data-parallel ranks seeds may be equal or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from q2compile.errors import ConfigError
from q2compile.torch_internals.dynamo import ASYNC_INPUTS_KEEP_GRADIENTS
from q2compile.torch_internals.private_names import AsyncCollectiveTensor

# For one mesh dimension: what x and bias must be there, y, the gradients of x, w and bias.
_Row = tuple[Placement, Placement, Placement, Placement, Placement, Placement]


def _row(x: Placement, w: Placement, last: int) -> _Row | str:
    """The row of the table for one mesh dimension, or why there is none. last: x's K."""
    if w == Shard(0):
        return Replicate(), w, Shard(last), Partial(), w, w
    if w == Shard(1):
        return Shard(last), Replicate(), Partial(), Shard(last), w, Replicate()
    if not w.is_replicate():
        return f"the weight is a DTensor placed {w}: Shard(0), Shard(1) and Replicate are taken"
    if x.is_replicate():
        return (Replicate(),) * 6
    if type(x) is Shard and x.dim != last:
        return x, Replicate(), x, x, Partial(), Partial()
    return (
        f"the weight is replicated and the activation placed {x}: it is taken when the activation "
        "is replicated or sharded on a batch or sequence dimension"
    )


@dataclass(frozen=True)
class ShardingPlan:
    """Placements, one for each mesh dimension; ``addends``: how many ranks add the bias to one sum
    of partial results."""

    x: tuple[Placement, ...]
    bias: tuple[Placement, ...]
    y: tuple[Placement, ...]
    grad_x: tuple[Placement, ...]
    grad_w: tuple[Placement, ...]
    grad_bias: tuple[Placement, ...]
    addends: int

    @classmethod
    def of(cls, x: Tensor, w: Tensor, bias: Tensor | None) -> ShardingPlan | str:
        """The plan for these operands, or why there is none."""
        operands = [t for t in (x, w, bias) if t is not None]
        if not all(isinstance(t, DTensor) for t in operands):
            return "some of activation, weight and bias are DTensors and some are not"
        meshes = {t.device_mesh for t in operands}  # type: ignore[attr-defined]
        if len(meshes) > 1:
            return "activation, weight and bias are DTensors on different device meshes"
        assert isinstance(x, DTensor) and isinstance(w, DTensor)
        rows = []
        for of_x, of_w in zip(x.placements, w.placements, strict=True):
            row = _row(of_x, of_w, x.ndim - 1)
            if isinstance(row, str):
                return row
            rows.append(row)
        if isinstance(bias, DTensor) and any(p.is_partial() for p in bias.placements):
            return f"the bias is a DTensor placed {bias.placements}: a pending sum"
        sizes = [n for n, p in zip(w.device_mesh.shape, w.placements, strict=True) if p == Shard(1)]
        columns: Any = (*zip(*rows, strict=True), math.prod(sizes))
        return cls(*columns)


class _Addend(torch.autograd.Function):
    """bias / n: one of the n ranks' equal shares in a bias that reaches a partial sum n times.

    dy is the whole gradient on each of them, and so is what the bias gets from it.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, n: int) -> Tensor:
        return bias / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def linear(
    x: Tensor,
    w: DTensor,
    bias: Tensor | None,
    local_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> DTensor:
    """y = x wᵀ + bias on DTensors, by ``local_linear`` of this rank's parts.

    Raises RuntimeError for placements that no plan covers. The graph that Dynamo captured was
    checked for them (`unplanned`), so this is for placements that came to be after that.
    """
    plan = ShardingPlan.of(x, w, bias)
    if isinstance(plan, str):
        raise RuntimeError(f"q2::linear: {plan}. Give this module 'bf16' in the policy")
    x_local = _placed(x, plan.x).to_local(grad_placements=plan.grad_x)
    w_local = w.to_local(grad_placements=plan.grad_w)
    b_local = None
    if bias is not None:
        b_local = _placed(bias, plan.bias).to_local(grad_placements=plan.grad_bias)
        if plan.addends > 1:
            b_local = _Addend.apply(b_local, plan.addends)
    y = local_linear(x_local, w_local, b_local)
    shape = torch.Size((*x.shape[:-1], w.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, w.device_mesh, plan.y, run_check=False, shape=shape, stride=stride)


def _placed(t: Tensor, placements: tuple[Placement, ...]) -> DTensor:
    """``t`` redistributed to ``placements``, unless it has them: a redistribute that changes
    nothing is an all-reduce in the backward when the gradient is Partial."""
    assert isinstance(t, DTensor), "ShardingPlan.of rejects anything else"
    return t if t.placements == placements else t.redistribute(placements=placements)


def raise_on_async_inputs(inputs: Iterable[Any]) -> None:
    """Raise ConfigError for an input that is a collective under way and wants a gradient, where
    torch gets that gradient wrong.
    """
    if ASYNC_INPUTS_KEEP_GRADIENTS:
        return
    for t in inputs:
        local = getattr(t, "_local_tensor", t)
        if isinstance(local, AsyncCollectiveTensor) and t.requires_grad:
            raise ConfigError(
                f"an input of the compiled code, {list(t.shape)}, is an AsyncCollectiveTensor, a "
                "collective that has not been waited for, and torch "
                f"{torch.__version__} loses its gradient there. Code that is not compiled made it, "
                "often a sequence-parallel embedding: compile both together, or pass x.clone(), "
                "which waits: "
                "embedding.register_forward_hook(lambda module, args, y: y.clone())"
            )


def unplanned(x: Tensor, w: Tensor, bias: Tensor | None) -> str:
    """Why `linear` can't take these operands; "" if it can, or if none is a DTensor."""
    if not any(isinstance(t, DTensor) for t in (x, w, bias)):
        return ""
    plan = ShardingPlan.of(x, w, bias)
    return plan if isinstance(plan, str) else ""


def smallest_part(t: Tensor) -> tuple[Any, ...]:
    """The shape of the smallest shard that any rank has of ``t``: the same answer on all ranks."""
    if not isinstance(t, DTensor):
        return tuple(t.shape)
    return _part(t.shape, t, t.placements, smallest=True)


def local_sizes(x: DTensor, w: DTensor) -> tuple[Any, Any, Any]:
    """(T, N, K) of the local linear, on the rank with the largest shards."""
    plan = ShardingPlan.of(x, w, None)
    assert isinstance(plan, ShardingPlan)
    n, k = _part(w.shape, w, w.placements)
    return math.prod(_part(x.shape, x, plan.x)[:-1]), n, k


def _part(
    shape: Sequence[Any], t: DTensor, placements: tuple[Placement, ...], smallest: bool = False
) -> tuple[Any, ...]:
    """The largest or the smallest shard, as torch cuts: ceil(size / n), and the last ranks less."""
    part = list(shape)
    for ranks, placement in zip(t.device_mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            size = part[placement.dim]
            chunk = -(-size // ranks)
            part[placement.dim] = max(0, size - (ranks - 1) * chunk) if smallest else chunk
    return tuple(part)
