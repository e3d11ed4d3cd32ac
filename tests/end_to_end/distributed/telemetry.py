# SPDX-License-Identifier: Apache-2.0
"""DDP in buckets, FSDP2 and tensor parallel on 2 ranks, with telemetry and without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import SAME_IN_ALL_LAYERS, ddp_in_buckets, half, sharded_blocks
from tensor_parallel import EAGER, tensor_parallel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import Result, new_model, run_scenarios, train

from q2compile.telemetry import flush
from tests.support.new_process import restart_clock

FOLDER = Path(sys.argv[1])


def buckets(options: dict[str, Any]) -> Result:
    return ddp_in_buckets({**SAME_IN_ALL_LAYERS, **options})


def fsdp(options: dict[str, Any]) -> Result:
    """Blocks that share a graph, each sharded on its own and recomputed in the backward."""
    model = new_model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
        model.layers[i].compile(backend="quartet2", options={**SAME_IN_ALL_LAYERS, **options})
    return half(sharded_blocks(model), model)


def tensor(options: dict[str, Any]) -> Result:
    model = tensor_parallel(dist.init_device_mesh("cpu", (2,)), layers=1)
    call = torch.compile(model, backend="quartet2", options={**EAGER, **options})
    return train(model, call)


def recording(name: str, scenario: Callable[[dict[str, Any]], Result]) -> Result:
    restart_clock()
    to = str(FOLDER / name)
    try:
        return scenario({"telemetry": {"every": 2, "to": to}})
    finally:
        flush()
        dist.barrier()


SCENARIOS: dict[str, Callable[[], Result]] = {}
for _name, _scenario in {"buckets": buckets, "fsdp": fsdp, "tensor": tensor}.items():
    SCENARIOS[f"{_name}_plain"] = partial(_scenario, {})
    SCENARIOS[_name] = partial(recording, _name, _scenario)

if __name__ == "__main__":
    run_scenarios(lambda ranks: SCENARIOS)
