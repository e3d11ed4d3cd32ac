# SPDX-License-Identifier: Apache-2.0
"""Run a model to learn something about it, and restore it afterwards."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from q2compile.capture.module_tree import is_module, named_modules, own_parameters
from q2compile.runtime_kernels.ops.seed import COUNTERS
from q2compile.torch_internals.private_names import FakeTensor

_OF_MODULES = frozenset(vars(nn.Module()))  # hooks among them, which others may change meanwhile
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)


class State:
    """The state of models that a call may change: buffers, submodules, training flags, gradients,
    ``requires_grad``, and attributes that the model's own Python code sets, such as counters and
    caches; ``weights``: also the values of parameters.

    Attributes are followed into containers, and into objects that hold nothing but data.
    """

    def __init__(self, *, weights: bool = False) -> None:
        self._with_weights = weights
        # id -> (tensor, a copy of it, whether it requires a gradient)
        self._values: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._parameters: dict[int, tuple[nn.Parameter, Tensor | None, bool]] = {}
        self._modules: dict[int, tuple[nn.Module, bool, set[str]]] = {}
        # id -> (container, the keys that are not restored, a copy of the rest)
        self._containers: dict[int, tuple[Any, Collection[str], Any]] = {}

    def keep_model(self, model: nn.Module) -> None:
        """Keep a model's state, and clear gradients."""
        for _, module in named_modules(model):
            if id(module) in self._modules:
                continue
            own = object.__getattribute__(module, "__dict__")
            parameters = own_parameters(module).values()
            self._modules[id(module)] = module, module.training, set(own.get("_parameters", ()))
            for p in parameters if self._with_weights else ():
                self._keep_value(p)
            self.keep_tensors(parameters)
            for name in ("_buffers", "_non_persistent_buffers_set", "_modules"):
                self._keep(own.get(name))
            if not _is_of_torch(type(module).forward):  # not of DDP and the like
                self._keep_container(own, _OF_MODULES)

    def keep_tensors(self, tensors: Iterable[Any]) -> None:
        """Keep the values of tensors; of parameters, only the gradients, which are cleared."""
        for t in tensors:
            if isinstance(t, nn.Parameter):
                if id(t) not in self._parameters and not is_lazy(t):
                    self._parameters[id(t)] = t, t.grad, t.requires_grad
                    t.grad = None
            elif isinstance(t, Tensor) and not isinstance(t, FakeTensor):
                self._keep_value(t)

    def _keep_value(self, t: Tensor) -> None:
        is_plain = type(t) is Tensor and t.layout == torch.strided
        is_freed = is_plain and t.untyped_storage().nbytes() < t.numel()  # by FSDP1
        if not t.is_meta and id(t) not in self._values and not is_freed:
            self._values[id(t)] = t, t.detach().clone(), t.requires_grad

    def _keep(self, value: Any) -> None:
        """Keep what an attribute or a container holds."""
        if isinstance(value, Tensor):
            self.keep_tensors([value])
        elif is_module(value):
            self.keep_model(value)
        elif isinstance(value, tuple):
            for part in value:
                self._keep(part)
        elif type(value) in _CONTAINERS:
            self._keep_container(value)
        elif not isinstance(value, _PLAIN) and _is_data(value, set()):
            self._keep_container(vars(value))

    def _keep_container(self, container: Any, others: Collection[str] = ()) -> None:
        if id(container) in self._containers:
            return
        saved = copy.copy(container)
        for key in others:
            saved.pop(key, None)
        self._containers[id(container)] = container, others, saved
        for value in list(saved.values() if isinstance(saved, dict) else saved):
            self._keep(value)

    def restore(self) -> None:
        """Restore all and drop it, because Dynamo keeps a backend and what that refers to."""
        for module, training, names in self._modules.values():
            module.training = training
            for name in [n for n in vars(module).get("_parameters", ()) if n not in names]:
                del module._parameters[name]
        for container, others, saved in self._containers.values():
            _restore_container(container, others, saved)
        with torch.no_grad():
            for t, value, requires_grad in self._values.values():
                _restore_tensor(t, value, requires_grad)
        for p, gradient, requires_grad in self._parameters.values():
            p.requires_grad = requires_grad
            p.grad = gradient
        for kept in (self._modules, self._containers, self._values, self._parameters):
            kept.clear()


def _restore_container(container: Any, others: Collection[str], saved: Any) -> None:
    if not isinstance(container, dict):
        same = len(container) == len(saved) and all(
            one is other for one, other in zip(container, saved, strict=True)
        )
        if not same:
            container.clear()
            container.update(saved) if isinstance(container, set) else container.extend(saved)
        return
    now = {key: value for key, value in container.items() if key not in others}
    if list(now) != list(saved) or any(now[key] is not saved[key] for key in saved):
        for key in now:
            del container[key]
        container.update(saved)


def _restore_tensor(t: Tensor, value: Tensor, requires_grad: bool) -> None:
    if t.grad_fn is not None and not requires_grad and not t._is_view():
        t.detach_()  # it was written to with what the graph of the call computed
    if t.layout == torch.jagged:
        t, value = t.values(), value.values()
    if (t.shape, t.dtype, t.device) != (value.shape, value.dtype, value.device):
        t.data = value
    elif not torch.equal(t, value):  # a write would count as a change of the tensor
        t.copy_(value)


def _is_data(value: Any, seen: set[int]) -> bool:
    """True if a value and all that it refers to are data: numbers, tensors, containers, and objects
    whose class is not of torch or Python. A reference to a trainer, with its threads, is not."""
    if id(value) in seen or isinstance(value, (*_PLAIN, Tensor)):
        return True
    seen.add(id(value))
    if isinstance(value, dict):
        return all(_is_data(part, seen) for part in value.values())
    if isinstance(value, list | tuple | set | deque):
        return all(_is_data(part, seen) for part in value)
    home = type(value).__module__.partition(".")[0]
    held = getattr(value, "__dict__", None)
    if home in ("torch", *sys.stdlib_module_names) or callable(value) or type(held) is not dict:
        return False
    return _is_data(held, seen)


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


@contextmanager
def as_it_was(model: nn.Module | None, *, weights: bool = False) -> Iterator[State]:
    """Restores ``model`` (see `State`) and torch's generators after the code inside."""
    state = State(weights=weights)
    if model is not None:
        state.keep_model(model)
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
    drawn = {key: of_key.clone() for key, of_key in list(COUNTERS.items())}
    with torch.random.fork_rng(devices=range(count)):
        try:
            yield
        finally:
            for key, of_key in list(COUNTERS.items()):
                of_key.copy_(drawn.get(key, torch.zeros_like(of_key)))
