# SPDX-License-Identifier: Apache-2.0
"""Code that is not compiled reads weights in the middle of a forward or a backward, where
`gather_codes` gathers their codes; plain FSDP2 gives it values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from recorded import BF16, Attach, Run, Training, mesh_of, of_tokens
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Build = Callable[..., Any]


class Around(nn.Module):
    """Its forward is not compiled; the module inside is."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Absorbed(Around):
    """Its forward also multiplies a weight of the module inside, in a function that it calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.01 * multiplied(self.inner, x)


def multiplied(module: Any, x: Tensor) -> Tensor:
    w = module.up.weight
    return x @ w.mT @ w


def layerwise_model(build: Build, kind: type[Around]) -> Any:
    model, _ = build(compiled=False, sharded=False)
    model.layers = nn.ModuleList(map(kind, model.layers))
    for layer in model.layers:
        layer.inner.compile(backend="quartet2", options={"inner": "eager"})
        fully_shard(layer, mesh=mesh_of(dist.get_world_size()), mp_policy=BF16)
    fully_shard(model, mesh=mesh_of(dist.get_world_size()), mp_policy=BF16)
    return model


def absorbed(build: Build, attach: Attach) -> Run:
    model = layerwise_model(build, Absorbed)
    return Training(model, model, attach).steps(4).done()


def hooked(build: Build, attach: Attach) -> Run:
    """Hooks of one rank, for one step: of a layer that is sharded by itself; then, where all is
    sharded at once, of the last norm in the forward and in the backward."""
    model = layerwise_model(build, Around)
    layerwise = Training(model, model, attach).steps(3)
    read = layerwise.run.notes.setdefault("read", [])

    def look(*weights: Tensor) -> None:
        read.extend(w.detach().clone() for w in weights)

    handles = []
    if dist.get_rank() == 1:
        of_layer = torch.compiler.disable(lambda m, *_: look(m.inner.up.weight))
        handles.append(model.layers[0].register_forward_pre_hook(of_layer))
    layerwise.steps(1)
    for handle in handles:
        handle.remove()
    layerwise.steps(2)

    at_once = Training(*build(root_only=True), attach).steps(3)
    linears, norm = [layer.up for layer in at_once.model.layers], at_once.model.norm
    handles = []
    if dist.get_rank() == 0:
        of_norm = torch.compiler.disable(lambda *_: look(*(m.weight for m in linears)))
        handles.append(norm.register_forward_pre_hook(of_norm))
        handles.append(norm.register_full_backward_hook(of_norm))
    at_once.steps(1)
    for handle in handles:
        handle.remove()
    at_once.steps(2)
    for what in ("losses", "digests", "bytes"):
        getattr(layerwise.run, what).extend(getattr(at_once.run, what))
    return layerwise.done()


def hooked_inside(build: Build, attach: Attach) -> Run:
    """A hook of one rank in a compiled layer. There Dynamo breaks the graph of every layer."""
    model, call = build()
    seen: list[Tensor] = []
    if dist.get_rank() == 0:
        look = torch.compiler.disable(lambda m, *_: seen.append(m.weight.detach().clone()))
        model.layers[0].up.register_forward_hook(look)
    training = Training(model, call, attach).steps(4)
    training.run.notes["read"] = seen
    return training.done()


def hidden(build: Build, attach: Attach) -> Run:
    """No hook, and no forward that names a weight when `gather_codes` is called. Another model of
    the process is then read by another backend."""
    training = Training(*build(root_only=True), attach).steps(3)
    linears, norm = [layer.up for layer in training.model.layers], training.model.norm
    forward = norm.forward
    average = torch.compiler.disable(lambda: [linear.weight.data.clone() for linear in linears])
    norm.forward = lambda x: (average(), forward(x))[1]
    try:
        training.steps(1)
    except RuntimeError as error:
        training.run.notes["error"] = str(error)
    other = Training(*build(root_only=True), attach).steps(3)
    for layer in other.model.layers:
        layer.compile(backend="aot_eager")
    with torch.no_grad():
        other.run.losses.append(of_tokens(other.model, 0, 0).item())
    return training.done()
