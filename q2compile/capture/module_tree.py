# SPDX-License-Identifier: Apache-2.0
"""The parts of a module, read where ``torch.nn.Module`` keeps them.

A model may override ``named_parameters`` or ``named_modules``, define ``__bool__``, ``__len__`` or
``__getattr__``, have properties that raise, or lack ``super().__init__()``. None of its own code
runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from q2compile.torch_internals.dynamo import original_module


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Whether its type is a module's: ``isinstance`` would ask the object for its ``__class__``."""
    return issubclass(type(value), nn.Module)


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The modules directly in ``module``, by name."""
    return {name: child for name, child in _children(module, "_modules") if is_module(child)}


def own_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters directly in ``module``, by name, without lazy ones, which have no shape yet.
    Under torch.func.functional_call they are plain tensors."""
    found = _children(module, "_parameters")
    return {name: p for name, p in found if isinstance(p, torch.Tensor) and not is_lazy(p)}


def _children(module: nn.Module, where: str) -> list[tuple[str, Any]]:
    attributes = object.__getattribute__(module, "__dict__")
    return list(attributes[where].items()) if where in attributes else []


def named_modules(module: nn.Module, *, twice: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) for ``module``, as "", and all that are in it.

    twice: a module with more than one name comes with each of them, else with the first."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module, above: frozenset[int]) -> Iterator[Any]:
        if id(module) in above or not twice and id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for part, child in children(module).items():
            yield from walk(under(name, part), child, above | {id(module)})

    return walk("", module, frozenset())


def named_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) for all parameters in ``module``; a shared one comes with each name."""
    for name, part in named_modules(module, twice=True):
        for leaf, parameter in own_parameters(part).items():
            yield under(name, leaf), parameter


def module_at(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path; None if there is none."""
    found: nn.Module | None = module
    for part in path.split(".") if path else ():
        found = children(found).get(part) if found is not None else None
    return found


def parameter_at(module: nn.Module, path: str) -> torch.Tensor | None:
    """The parameter at a dotted path; None if there is none."""
    home, _, leaf = path.rpartition(".")
    owner = module_at(module, home)
    return None if owner is None else own_parameters(owner).get(leaf)


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = original_module(module)
        if inner is None and issubclass(type(module), nn.parallel.DistributedDataParallel):
            inner = children(module).get("module")
        if inner is None:
            return module
        module = inner


def under(name: str, part: str) -> str:
    """The name of ``part`` inside what is called ``name``; either may be ""."""
    return f"{name}.{part}" if name and part else name or part
