# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 on 2 ranks, each with half of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Model, Result, new_model, run_scenarios, train

# layers.0 and layers.1 differ, so one graph for each layer could not follow the policy.
POLICY = {"layers.1.*": {"recipe": "quartet2", "wgrad": "bf16"}, "head": "bf16"}
EAGER: dict[str, Any] = {"inner": "eager", "policy": POLICY}
INDUCTOR: dict[str, Any] = {"policy": POLICY}
SAME_IN_ALL_LAYERS: dict[str, Any] = {"inner": "eager", "policy": {"*.down": "bf16"}}


def half(model: torch.nn.Module, call: Any) -> Result:
    """Each rank has its half of the batch and random bits of its own."""
    rank = dist.get_rank()
    return train(model, call, parts=2, part=rank, rounding_seed=rank)


def compiled(model: Any, options: dict[str, Any] | None) -> Any:
    """None: not compiled, whose collectives are those to compare with."""
    return model if options is None else torch.compile(model, backend="quartet2", options=options)


def ddp_around_the_compiled_model(options: dict[str, Any] | None) -> Result:
    model = DistributedDataParallel(compiled(new_model(), options))
    return half(model, model)


def ddp_in_buckets(options: dict[str, Any]) -> Result:
    """Dynamo cuts the graph so that gradients travel while the backward still runs."""
    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 1024
    try:
        model = DistributedDataParallel(new_model(), bucket_cap_mb=0.05)
        return half(model, compiled(model, options))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first


def fsdp(options: dict[str, Any] | None) -> Result:
    model = fully_shard(new_model(), mesh=dist.init_device_mesh("cpu", (2,)))
    return half(model, compiled(model, options))


def sharded_blocks(model: Model, **kwargs: Any) -> Model:
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def fsdp_blocks(options: dict[str, Any]) -> Result:
    """FSDP's hooks around the blocks break the graph, so each block is a graph, shared by all."""
    model = sharded_blocks(new_model())
    return half(model, compiled(model, options))


def fsdp_compiled_blocks(options: dict[str, Any] | None, checkpointed: bool = False) -> Result:
    """Each block compiled, then sharded, computing in bf16; the norm and the head stay eager."""
    model = new_model()
    for i, layer in enumerate(model.layers):
        if checkpointed:
            model.layers[i] = checkpoint_wrapper(layer)
        if options is not None:
            model.layers[i].compile(backend="quartet2", options=options)
    sharded_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return half(model, model)


SCENARIOS: dict[str, Callable[[], Result]] = {
    "ddp_around_the_compiled_model": lambda: ddp_around_the_compiled_model(EAGER),
    "ddp_not_compiled": lambda: ddp_around_the_compiled_model(None),
    "ddp_in_buckets": lambda: ddp_in_buckets(EAGER),
    "fsdp": lambda: fsdp(INDUCTOR),
    "fsdp_not_compiled": lambda: fsdp(None),
    "fsdp_blocks": lambda: fsdp_blocks(SAME_IN_ALL_LAYERS),
    "fsdp_blocks_told_apart": lambda: fsdp_blocks(EAGER),
    "fsdp_compiled_blocks": lambda: fsdp_compiled_blocks(SAME_IN_ALL_LAYERS),
    "fsdp_blocks_not_compiled": lambda: fsdp_compiled_blocks(None),
    "fsdp_checkpointed_blocks": lambda: fsdp_compiled_blocks(SAME_IN_ALL_LAYERS, checkpointed=True),
}

if __name__ == "__main__":
    run_scenarios(lambda ranks: SCENARIOS)
