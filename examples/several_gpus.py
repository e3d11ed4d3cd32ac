# SPDX-License-Identifier: Apache-2.0
"""How train_llama.py trains one Llama on several GPUs, with one process of torchrun per GPU.

    torchrun --nproc-per-node 2 examples/train_llama.py --ddp
    torchrun --nproc-per-node 2 examples/train_llama.py --fsdp
    torchrun --nproc-per-node 2 examples/train_llama.py --tp 2
    torchrun --nproc-per-node 4 examples/train_llama.py --fsdp --tp 2

The batch is split among the data-parallel processes, and the processes of a tensor-parallel group
see the same sequences. Nothing here depends on quantization: the options of `torch.compile(model,
backend="quartet2", options=...)`, and the names in a policy, are the same as on one GPU.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several GPUs, under torchrun")
    data = group.add_mutually_exclusive_group()
    data.add_argument("--ddp", action="store_true", help="DistributedDataParallel")
    data.add_argument("--fsdp", action="store_true", help="FSDP2: fully_shard every layer")
    group.add_argument("--tp", type=int, default=1, help="how many processes share each matmul")


class Team:
    """The processes that train one model together, or a single one without torchrun.

    Raises a ValueError if the arguments do not match the number of processes, or each other.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.fsdp, self.ddp, self.tp = args.fsdp, args.ddp, args.tp
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.data_size = self.size // self.tp if self.tp > 0 else 0
        self._check(args.batch)
        self.mesh: DeviceMesh | None = None
        self.rank, self.data_rank = 0, 0
        if self.fsdp or self.ddp or self.tp > 1:
            if args.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            shape, names = (self.data_size, self.tp), ("data", "tensor")
            self.mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
            self.rank, self.data_rank = dist.get_rank(), self.mesh.get_local_rank("data")

    def _check(self, batch: int) -> None:
        if self.tp < 1 or self.size % self.tp:
            raise ValueError(f"--tp: got {self.tp}; allowed: a divisor of {self.size} processes")
        if self.size > 1 and not (self.ddp or self.fsdp or self.tp > 1):
            raise ValueError(f"{self.size} processes need one of --ddp, --fsdp and --tp")
        if (self.ddp or self.fsdp) and "WORLD_SIZE" not in os.environ:
            raise ValueError("--ddp and --fsdp need torchrun --nproc-per-node N")
        if self.tp > 1 and (self.ddp or (self.data_size > 1 and not self.fsdp)):
            raise ValueError(f"--tp {self.tp} with {self.size} processes needs --fsdp")
        if batch % self.data_size:
            allowed = f"a multiple of {self.data_size} data-parallel processes"
            raise ValueError(f"--batch: got {batch}; allowed: {allowed}")

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.leads:
            print(text, flush=True)

    def compile(self, model: nn.Module, **how: Any) -> nn.Module:
        """Compile ``model``, and spread it over the team. The names of its parameters stay.

        how: arguments of torch.compile
        """
        if self.mesh is None:
            return torch.compile(model, **how)  # type: ignore[return-value]
        if self.tp > 1:
            parallelize_llama(model, self.mesh["tensor"])
        if self.ddp:
            return torch.compile(DistributedDataParallel(model), **how)  # type: ignore[return-value]
        if not self.fsdp:
            return torch.compile(model, **how)  # type: ignore[return-value]
        for layer in model.model.layers:  # type: ignore[union-attr]
            # FSDP's hooks run between the layers and would break a graph of the whole model.
            layer.compile(**how)
            fully_shard(layer, mesh=self.mesh["data"])
        fully_shard(model, mesh=self.mesh["data"])
        return model

    def share(self, batch: Tensor) -> Tensor:
        """Return the sequences of a batch [B, ...] that this process trains on."""
        return batch.chunk(self.data_size)[self.data_rank]

    def mean(self, loss: Tensor) -> Tensor:
        """Average a loss over the whole batch."""
        if self.mesh is None or self.data_size == 1:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group("data"))
        return total / self.data_size

    def close(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()


class Redundant(ParallelStyle):
    """A style in which each process computes the whole module, with equal copies of its weights."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(args[0], mesh, [Replicate()]), *args[1:])

        def leave(module: nn.Module, y: Any, mesh: DeviceMesh) -> Tensor:
            return y.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def parallelize_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the heads and the columns of the MLPs; compute everything else redundantly.

    Redundant parameters become DTensors as well, because clip_grad_norm_ accepts no mixture.
    """
    column, row, redundant = ColwiseParallel(), RowwiseParallel(), Redundant()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": redundant,
        "model.layers.*.input_layernorm": redundant,
        "model.layers.*.self_attn.[qkv]_proj": column,
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.post_attention_layernorm": redundant,
        "model.layers.*.mlp.gate_proj": column,
        "model.layers.*.mlp.up_proj": column,
        "model.layers.*.mlp.down_proj": row,
        "model.norm": redundant,
        "lm_head": redundant,
    }
    parallelize_module(model, mesh, plan)
