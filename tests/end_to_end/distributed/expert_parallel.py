# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on 2 ranks, each with half of the experts and half of the tokens, as
torchtitan does it: tokens to the ranks of their experts and back, FSDP2 in mixed precision for the
rest, blocks checkpointed, and the experts compiled inside of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, INNER, EXPERTS, ROWS = 64, 96, 4, 80
EMPTY = 2  # the expert that gets no tokens


class Experts(nn.Module):
    """x [T, WIDTH], counts int32 [experts of this rank] -> [T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * INNER**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), up.bfloat16().mT, offs=offs))
        return torch._grouped_mm(h, down.bfloat16().mT, offs=offs).type_as(x)


class Block(nn.Module):
    """x + experts(norm(x)), with the second-best expert for each row. mesh: of expert parallelism.
    The router chooses by one weight row per expert, not quantized."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.router, self.experts, self.mesh = nn.Linear(WIDTH, EXPERTS), Experts(), mesh

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (WIDTH,))
        scores = self.router(h).float().softmax(-1)
        weight, chosen = scores.index_fill(1, torch.tensor([EMPTY]), 0).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS).int()
        y = (self.own if self.mesh is None else self.everywhere)(h[order], counts)
        return x + torch.zeros_like(x).index_copy(0, order, y * weight[order, None].to(y))

    def own(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.experts(rows, counts)

    def everywhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert self.mesh is not None
        ranks, group = self.mesh.size(), self.mesh.get_group()
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = coming.view(ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(rows, got, sent, group)
        expert = torch.arange(len(coming)) % (EXPERTS // ranks)
        order = expert.repeat_interleave(coming.long()).argsort(stable=True)
        y = self.experts(rows[order], coming.view(ranks, -1).sum(0).int())
        y = torch.empty_like(y).index_copy(0, order, y)
        return all_to_all_single_autograd(y, sent, got, group)


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(mesh) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def gradients_of(model: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    (model(x).float() - target).square().mean().backward()
    wrapper = "_checkpoint_wrapped_module."
    return {n.replace(wrapper, ""): p.grad for n, p in model.named_parameters()}


def sharded(mesh: DeviceMesh, options: dict[str, Any] | None) -> nn.Module:
    """Experts on the ranks, the rest by FSDP2; fp32 masters, bf16 elsewhere."""
    torch.manual_seed(0)
    model = Model(mesh)
    held = set()
    for i, layer in enumerate(model.layers):
        for name, weight in list(layer.experts.named_parameters()):
            shard = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
            setattr(layer.experts, name, shard)
            held.add(shard)
        if options is not None:
            layer.experts.compile(backend="quartet2", options=options, dynamic=True)
        model.layers[i] = checkpoint_wrapper(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=held)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    x, target = torch.randn(2, 2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found = {}
    for recipe in (None, "quartet2", "nvfp4"):
        torch._dynamo.reset()
        dump = str(folder / str(recipe))
        options = recipe and {"inner": "eager", "recipe": recipe, "dump": dump}
        model = sharded(mesh, options or None)
        torch.manual_seed(rank)
        gradients = gradients_of(model, x[rank], target[rank])
        # A rank's experts have seen all tokens; the losses are means of a rank's.
        found[recipe] = {
            n: g.full_tensor() / (2 if "experts" in n else 1) for n, g in gradients.items()
        }
    torch.manual_seed(0)
    model = Model(None)
    whole = [gradients_of(model, x[i], target[i]) for i in range(2)][1]  # of both: they add up
    if rank == 0:
        torch.save((found, {n: g / 2 for n, g in whole.items()}), folder / "gradients.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
