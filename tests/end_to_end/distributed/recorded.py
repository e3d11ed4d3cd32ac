# SPDX-License-Identifier: Apache-2.0
"""A training that is recorded bit by bit, with the bytes of its collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import expert_parallel
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from training import VOCAB, loss_of

from q2compile.report.report import RunReport, collector

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
all_reduce = dist.all_reduce
BATCH, SEQ, STEPS, LONG = 4, 32, 5, 8
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
Attach = Callable[[nn.Module], int]


@dataclass
class Run:
    """The results of one rank. bytes, reduced: its bytes in all-gathers and in all-reduces, by
    step."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of all gradients of a step, and the weights
    bytes: list[int] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    count: int | None = None  # what gather_codes returned
    why: dict[str, str] = field(default_factory=dict)  # module -> what the report says of it
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Wire:
    """FSDP2's all-gather, counted; and all all-reduces, FSDP2's of replicas and gather_codes'."""

    def __init__(self) -> None:
        self.bytes = self.reduced = 0

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.reduced += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op=False):
        self.bytes += input_tensor.nbytes
        return all_gather(output_tensor, input_tensor, group, async_op)


def no_attach(model: nn.Module) -> int:
    return 0


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tokens_of(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(VOCAB, (dist.get_world_size() * 2, SEQ), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def of_tokens(call: Any, step: int, part: int) -> Tensor:
    tokens = tokens_of(step, part)
    return loss_of(call(tokens), tokens)


def of_vectors(call: Any, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, target = torch.randn(2, 80, expert_parallel.WIDTH, generator=generator)
    return (call(x).float() - target).square().mean()


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        local = t.to_local() if isinstance(t, DTensor) else t
        found.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Training:
    """Steps of AdamW, each recorded in ``run``."""

    def __init__(
        self,
        model: Any,
        call: Any,
        attach: Attach | None,
        loss: Callable[[Any, int, int], Tensor] | None = None,
    ) -> None:
        """loss: of ``call`` on this rank's data of a step, and of a part of it."""
        self.run, self.wire, self.model, self.call = Run(), Wire(), model, call
        self.loss = loss or of_tokens
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(self.wire)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.step, self.report = 0, RunReport()
        if attach is not None:
            self.run.count = attach(model)
        torch.manual_seed(dist.get_rank())

    def steps(self, number: int, micro_batches: int = 1) -> Training:
        token = collector.set(self.report)
        dist.all_reduce = self.wire.all_reduce
        for _ in range(number):
            self.step += 1
            before, reduced, total = self.wire.bytes, self.wire.reduced, 0.0
            for part in range(micro_batches):
                if micro_batches > 1:
                    self.model.set_requires_gradient_sync(part == micro_batches - 1)
                loss = self.loss(self.call, self.step, part)
                loss.backward()
                total += loss.item()
            self.run.bytes.append(self.wire.bytes - before)
            self.run.reduced.append(self.wire.reduced - reduced)
            self.run.losses.append(total)
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.run.digests.append(digest([*gradients, *self.model.parameters()]))
            self.optimizer.zero_grad()
        collector.reset(token)
        dist.all_reduce = all_reduce
        return self

    def done(self) -> Run:
        rows = self.report.to_json()
        self.run.why = {row["module"]: row["why"] or row["gathered"] for row in rows}
        return self.run
