# SPDX-License-Identifier: Apache-2.0
"""`q2compile.export` of sharded models on 2 ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import sharded_blocks
from tensor_parallel import tensor_parallel
from torch import Tensor, nn
from training import HIDDEN, VOCAB, Result, new_model, run_scenarios

import q2compile

FOLDER = Path(sys.argv[1])
TOKENS = torch.arange(64).view(2, 32) % VOCAB


def exported(model: Any, name: str, format: str, **arguments: Any) -> Result:
    given = {"options": {}, "autocast": torch.bfloat16, "example_inputs": TOKENS, **arguments}
    done = q2compile.export(model, FOLDER / name, format=format, **given)
    assert (FOLDER / name / "model.safetensors").exists()
    assert done.layers
    return Result()


def fsdp(format: str) -> Result:
    """Every block sharded, and calibrated by other tokens on each rank."""
    batches = [(TOKENS + dist.get_rank()) % VOCAB]
    static = {"activations": "static", "calibration": batches}
    return exported(sharded_blocks(new_model()), f"fsdp_{format}", format, **static)


def tensor() -> Result:
    mesh = dist.init_device_mesh("cpu", (2,))
    return exported(tensor_parallel(mesh, local=False), "tensor", "safetensors")


def fails() -> Result:
    """Rank 0 alone quantizes, and says why it can't; no rank waits, nothing is left."""
    model = new_model()
    with torch.no_grad():
        model.layers[0].gate.weight[0, 0] = torch.nan
    try:
        exported(sharded_blocks(model), "broken", "compressed-tensors")
    except ValueError as error:
        assert "holds a NaN" in str(error), error
        dist.barrier()
        assert not list(FOLDER.glob("*broken*"))
        return Result()
    raise AssertionError("it was exported")


def stages() -> Result:
    """Pipeline stages: each rank writes its own, and different ones are refused in one folder."""
    rank, x = dist.get_rank(), torch.ones(2, HIDDEN)
    model = new_model()
    stage: Any = nn.Sequential(model.layers[1], model.norm) if rank else model.layers[0]
    try:
        exported(stage, "stages", "safetensors", example_inputs=x)
    except ValueError as error:
        assert "ranks 0, 1 export models with different parameters" in str(error), error
        return exported(stage, f"stage{rank}", "safetensors", example_inputs=x)
    raise AssertionError("both were exported")


class Routed(nn.Module):
    """One of two linears for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) if x.amax() > 1 else self.small(x)


def routed() -> Result:
    """The batches of one rank reach fewer layers than those of the other."""
    batches = [torch.ones(2, 64), 4 * torch.ones(2, 64)]
    calibration = batches if dist.get_rank() == 0 else [batches[0]]
    static = {"activations": "static", "calibration": calibration, "example_inputs": None}
    return exported(Routed(), "routed", "safetensors", **static)


SCENARIOS: dict[str, Callable[[], Result]] = {
    "fails": fails,
    "fsdp_plain": lambda: fsdp("safetensors"),
    "fsdp_packed": lambda: fsdp("compressed-tensors"),
    "tensor_plain": tensor,
    "stages": stages,
    "routed": routed,
}

if __name__ == "__main__":
    run_scenarios(lambda ranks: SCENARIOS)
