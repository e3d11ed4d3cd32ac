# SPDX-License-Identifier: Apache-2.0
"""How train_llama.py spreads one Llama over the processes that torchrun starts, one for each GPU.

    torchrun --nproc-per-node 2 examples/train_llama.py --ddp
    torchrun --nproc-per-node 2 examples/train_llama.py --fsdp
    torchrun --nproc-per-node 2 examples/train_llama.py --tp 2
    torchrun --nproc-per-node 4 examples/train_llama.py --fsdp --tp 2

The batch is cut among the data-parallel processes; the processes of one tensor-parallel group see
the same sequences. Nothing here knows of quantization: the options of `torch.compile(model,
backend="quartet2", options=...)` are those of one GPU, with the names of the plain model.
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
    group.add_argument("--tp", type=int, default=1, help="processes that share each matmul")


class Team:
    """The processes that train one model together; a single one without torchrun.

    Raises ValueError when the arguments do not fit the number of processes, or each other.
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
            raise ValueError(f"--tp {self.tp}: {self.size} processes can't form groups of that")
        if self.size > 1 and not (self.ddp or self.fsdp or self.tp > 1):
            raise ValueError(f"{self.size} processes: say how, by --ddp, --fsdp or --tp")
        if (self.ddp or self.fsdp) and "WORLD_SIZE" not in os.environ:
            raise ValueError("--ddp and --fsdp: start this with torchrun --nproc-per-node N")
        if self.tp > 1 and (self.ddp or (self.data_size > 1 and not self.fsdp)):
            raise ValueError(f"--tp {self.tp} of {self.size} processes: the rest is for --fsdp")
        if batch % self.data_size:
            raise ValueError(f"--batch {batch}: not to be cut among {self.data_size} processes")

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.leads:
            print(text, flush=True)

    def compile(self, model: nn.Module, **how: Any) -> nn.Module:
        """``model`` compiled, and spread over the team; its parameters stay where they are named.

        how: arguments of torch.compile.
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
            # FSDP's hooks stand between the layers and would break a graph of the whole model.
            layer.compile(**how)
            fully_shard(layer, mesh=self.mesh["data"])
        fully_shard(model, mesh=self.mesh["data"])
        return model

    def share(self, batch: Tensor) -> Tensor:
        """This process's sequences of a batch [B, ...]."""
        return batch.chunk(self.data_size)[self.data_rank]

    def mean(self, loss: Tensor) -> Tensor:
        """The mean of a loss over the whole batch."""
        if self.mesh is None or self.data_size == 1:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group("data"))
        return total / self.data_size

    def close(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()


class Redundant(ParallelStyle):
    """Every process computes the whole module, on copies of its parameters that stay equal."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(args[0], mesh, [Replicate()]), *args[1:])

        def leave(module: nn.Module, y: Any, mesh: DeviceMesh) -> Tensor:
            return y.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def parallelize_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    """Heads and the MLP's columns are cut; the rest is computed redundantly.

    Redundant parameters become DTensors too: clip_grad_norm_ takes DTensors or none.
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
