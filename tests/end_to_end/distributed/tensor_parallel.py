# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallel on 2 ranks, and with FSDP2 around it on 4."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import (
    INNER,
    LAYERS,
    UNEVEN,
    Model,
    Result,
    batches,
    loss_of,
    new_model,
    run_scenarios,
    train,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from several_gpus import Redundant

EAGER: dict[str, Any] = {"inner": "eager"}
# Each recipe in a column-wise layer; one in the row-wise one, one in a redundant one.
FP8: dict[str, Any] = {
    "recipe": "fp8",
    "policy": {"*.gate": "quartet2_fp8", "*.down": "quartet2_fp8"},
}


def tensor_parallel(
    mesh: DeviceMesh, inner: int = INNER, local: bool = True, layers: int = LAYERS
) -> Model:
    """Column- and row-wise blocks; norms and head are computed redundantly. local: the activations
    between up and down are plain tensors."""
    column = ColwiseParallel(use_local_output=local)
    plan: dict[str, ParallelStyle] = {"norm": Redundant(), "head": Redundant()}
    for i in range(layers):
        plan[f"layers.{i}.norm"] = Redundant()
        plan[f"layers.{i}.gate"] = plan[f"layers.{i}.up"] = column
        plan[f"layers.{i}.down"] = RowwiseParallel()
    return parallelize_module(new_model(inner, layers), mesh, plan)  # type: ignore[return-value]


def sequence_parallel(mesh: DeviceMesh, layers: int = LAYERS) -> Model:
    """Between the matmuls each rank has half of every sequence; the vocabulary is cut, too."""
    column = ColwiseParallel(input_layouts=Shard(1))
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(layers):
        plan[f"layers.{i}.norm"] = SequenceParallel()
        plan[f"layers.{i}.gate"] = plan[f"layers.{i}.up"] = column
        plan[f"layers.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(new_model(layers=layers), mesh, plan)  # type: ignore[return-value]


def whole(parallel: Callable[..., Model], options: dict[str, Any] | None, **how: Any) -> Result:
    """All of a model of one layer, compiled unless options are None. how: as in `train`."""
    model = parallel(dist.init_device_mesh("cpu", (2,)), layers=1)
    call: Any = model
    if options is not None:
        call = torch.compile(model, backend="quartet2", options=options)
    result = train(model, call, **how)
    if options == {}:  # three steps more, with a generator on each rank
        result.drifted = train(model, call, rounding_seed=dist.get_rank()).parameters
    return result


def uneven(mesh: DeviceMesh, layers: int) -> Model:
    """66 columns on one rank, 65 on the other."""
    return tensor_parallel(mesh, UNEVEN, local=False, layers=layers)


def embedding_outside(wait: bool) -> Result:
    """Compiled blocks behind an eager sequence-parallel embedding."""
    model = sequence_parallel(dist.init_device_mesh("cpu", (2,)))
    if wait:
        model.embed.register_forward_hook(lambda module, args, y: y.clone())
    for layer in model.layers:
        layer.compile(backend="quartet2", options=EAGER)
    return train(model, model)


def without_gradients() -> Result:
    """The loss of the first batch, in no_grad and in inference mode."""
    model = tensor_parallel(dist.init_device_mesh("cpu", (2,)), layers=1)
    call = torch.compile(model, backend="quartet2", options=EAGER)
    losses = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            losses.append(loss_of(call(batches()[0]), batches()[0]).item())
    return Result(losses=losses)


def two_dimensional(options: dict[str, Any] | None) -> Result:
    """2 x 2: halves of the batch by FSDP2, halves of the matmuls by tensor parallel."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    for layer in model.layers if options is not None else ():
        layer.compile(backend="quartet2", options=options)
    return train(model, model, parts=2, part=mesh["data"].get_local_rank())


ON_2_RANKS: dict[str, Callable[[], Result]] = {
    "tensor": lambda: whole(tensor_parallel, {}),
    "tensor_not_compiled": lambda: whole(tensor_parallel, None),
    "tensor_autocast_seed": lambda: whole(
        tensor_parallel, {**EAGER, "seed": 7}, autocast=True, rounding_seed=dist.get_rank()
    ),
    "sequence": lambda: whole(sequence_parallel, EAGER),
    "sequence_bf16": lambda: whole(sequence_parallel, {**EAGER, "recipe": "bf16"}),
    "fp8": lambda: whole(tensor_parallel, {**EAGER, **FP8}),
    "uneven": lambda: whole(uneven, EAGER),
    "embedding_outside": lambda: embedding_outside(wait=False),
    "embedding_outside_waited_for": lambda: embedding_outside(wait=True),
    "without_gradients": without_gradients,
}
ON_4_RANKS: dict[str, Callable[[], Result]] = {
    "two_dimensional": lambda: two_dimensional(EAGER),
    "two_dimensional_not_compiled": lambda: two_dimensional(None),
}

if __name__ == "__main__":
    run_scenarios(lambda ranks: ON_2_RANKS if ranks == 2 else ON_4_RANKS)
