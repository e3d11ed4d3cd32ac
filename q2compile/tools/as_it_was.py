# SPDX-License-Identifier: Apache-2.0
"""Run a model to learn something about it, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from q2compile.capture.module_tree import named_modules, own_buffers, own_parameters
from q2compile.runtime_kernels.ops.seed import counters
from q2compile.torch_internals.private_names import FakeTensor


class State:
    """The state of models that a call may change: buffers, training flags, gradients; `weights`,
    too.

    A buffer that the call replaces by one of another shape, a cache that grew, stays replaced, and
    so do attributes that the model's own Python code sets.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (tensor, a copy of it)
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._modules: dict[int, tuple[nn.Module, bool, dict[str, Tensor]]] = {}

    def keep_model(self, model: nn.Module, *, weights: bool = False) -> None:
        """Keep a model's state, and clear gradients. ``weights``: also its parameters' values."""
        for _, module in named_modules(model):
            if id(module) in self._modules:
                continue
            self._modules[id(module)] = module, module.training, own_buffers(module)
            parameters = own_parameters(module).values()
            self.keep_tensors(own_buffers(module).values())
            self.keep_tensors(parameters)
            for p in parameters if weights else ():
                self._keep_value(p)

    def keep_tensors(self, tensors: Iterable[Any]) -> None:
        """Keep the values of tensors; of parameters, only the gradients, which are cleared."""
        for t in tensors:
            if isinstance(t, nn.Parameter):
                if id(t) not in self._gradients:
                    self._gradients[id(t)] = t, t.grad
                    t.grad = None
            elif isinstance(t, Tensor) and not isinstance(t, FakeTensor):
                self._keep_value(t)

    def _keep_value(self, t: Tensor) -> None:
        if not t.is_meta and id(t) not in self._values:
            self._values[id(t)] = t, t.detach().clone()

    def restore(self) -> None:
        """Restore all and drop it, because Dynamo keeps a backend and what that refers to."""
        for module, training, buffers in self._modules.values():
            module.training = training
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is not None and now is not buffer and now.shape == buffer.shape:
                    module._buffers[name] = buffer
        with torch.no_grad():
            for t, value in self._values.values():
                if t.layout == torch.jagged:
                    t, value = t.values(), value.values()
                if not torch.equal(t, value):  # a write would count as a change of the tensor
                    t.copy_(value)
        for p, gradient in self._gradients.values():
            p.grad = gradient
        for saved in (self._modules, self._values, self._gradients):
            saved.clear()


@contextmanager
def as_it_was(model: nn.Module | None, *, weights: bool = False) -> Iterator[State]:
    """Restores ``model`` (see `State`) and torch's generators after the code inside."""
    state = State()
    if model is not None:
        state.keep_model(model, weights=weights)
    try:
        with same_random_numbers():
            yield state
    finally:
        state.restore()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore torch's generators and the counters of the option ``seed`` at the end; CUDA's
    generators only if the program already uses CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    drawn = {key: of_key.clone() for key, of_key in counters().items()}
    with torch.random.fork_rng(devices=range(count)):
        try:
            yield
        finally:
            for key, of_key in counters().items():
                of_key.copy_(drawn.get(key, torch.zeros_like(of_key)))
