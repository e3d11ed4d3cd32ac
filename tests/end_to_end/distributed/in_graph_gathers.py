# SPDX-License-Identifier: Apache-2.0
"""Models whose graphs gather their weights, on 2 ranks."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_parallel
import torch
import torch.distributed as dist
from recorded import (
    Attach,
    Run,
    Training,
    mesh_of,
    no_attach,
    of_tokens,
    of_vectors,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from training import new_model


class InGraph(nn.Module):
    """A linear whose weight is a DTensor that its forward gathers, as SimpleFSDP's are; or a plain
    shard (functional). read: something besides the linear reads the weight."""

    def __init__(
        self, linear: nn.Linear, mesh: DeviceMesh, functional: bool, read: bool = False
    ) -> None:
        super().__init__()
        self.read = read
        shard = distribute_tensor(linear.weight.detach(), mesh, [Shard(0)])
        self.weight = nn.Parameter(shard.to_local().clone() if functional else shard)
        self.mesh, self.functional = mesh, functional

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            w = all_gather_tensor_autograd(self.weight.bfloat16(), 0, self.mesh.get_group())
        else:
            w = whole(self.weight)
        y = nn.functional.linear(x, w)
        return y * w.abs().mean() if self.read else y


class GatheringExperts(expert_parallel.Experts):
    """Stacks of experts that the forward gathers: one cut by experts, one along their rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(1)]))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        up, down = map(whole, (self.up, self.down))
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        h = nn.functional.silu(torch._grouped_mm(x.bfloat16(), up.mT, offs=offs))
        return torch._grouped_mm(h, down.mT, offs=offs).type_as(x)


def whole(shard: Any) -> Tensor:
    gathered = shard.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    found: Tensor = gathered.to_local(grad_placements=[Partial("avg")])
    return found


def in_graph(attach: Attach) -> Run:
    """One linear gathers a DTensor, two a plain shard; something else reads one of these."""
    mesh, model = mesh_of(2), new_model().bfloat16()
    model.layers = model.layers[:1]
    layer = model.layers[0]
    layer.gate = InGraph(layer.gate, mesh, functional=False)
    layer.up = InGraph(layer.up, mesh, functional=True)
    layer.down = InGraph(layer.down, mesh, functional=True, read=True)
    return _recorded(model, [model], attach, "quartet2", of_tokens, inner="inductor")


def in_graph_experts(attach: Attach) -> Run:
    torch.manual_seed(0)
    model = expert_parallel.Model(None)
    for layer in model.layers:
        layer.experts = GatheringExperts(mesh_of(2))
    parts = [layer.experts for layer in model.layers]
    return _recorded(model, parts, attach, "nvfp4", of_vectors)


def _recorded(
    model: nn.Module,
    parts: list[Any],
    attach: Attach,
    recipe: str,
    loss: Callable[..., Tensor],
    inner: str = "eager",
) -> Run:
    """parts: the modules to compile. Without gather_codes the pass that moves the quantizers before
    the gathers is disabled. notes: the bytes that a rank sends in the gathers of the compiled
    graphs."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"inner": inner, "recipe": recipe, "dump": folder}
        options["policy"] = {"head": "bf16"}
        options["disable_passes"] = ["quantize_shards"] if attach is no_attach else []
        for part in parts:
            part.compile(backend="quartet2", options=options, dynamic=len(parts) > 1)
        run = Training(model, model, None, loss).steps(4).done()
        graphs = Path(folder, f"rank{dist.get_rank()}").glob("*/4_after_passes_*.txt")
        gathers = r": (u8|bf16)\[([\d, ]+)\] = _c10d_functional\.all_gather_into_tensor"
        found = [m for path in graphs for m in re.findall(gathers, path.read_text())]
    size = {"u8": 1, "bf16": 2}
    sent = [size[kind] * math.prod(map(int, shape.split(", "))) // 2 for kind, shape in found]
    run.notes["bytes"] = sum(sent)
    return run
