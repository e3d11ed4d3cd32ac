# SPDX-License-Identifier: Apache-2.0
"""Which modules have code that is not compiled and may read weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from q2compile.weight_cache.eager_readers import EagerReaders


class Reads(nn.Module):
    """A forward that names the weight of a module inside, in a method and a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.absorbed(x)

    def absorbed(self, x: Tensor) -> Tensor:
        return sum([x @ linear.weight for linear in [self.linear]], x)


class Calls(nn.Module):
    """A forward that calls the modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.linear = Reads(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.reads(x))


readers_of_this_file = sys.modules[__name__]


def product(module: Any, x: Tensor) -> Tensor:
    return x @ module.linear.weight


class Product:
    def of(self, module: Any, x: Tensor) -> Tensor:
        return product(module, x)

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        return product(module, x)


def closure(module: Calls) -> Any:
    weights = [module.linear.weight]
    return lambda _, x: x @ weights[0]


class Helped(Calls):
    """A forward that calls something else for a product with a weight."""

    def __init__(self, make: Callable[[Calls], Any]) -> None:
        super().__init__()
        self.helper = make(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.helper(self, x))


class Listed(Helped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.helper[0](self, x))


class ByMethod(Helped):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.helper.of(self, x))


class Qualified(Helped):
    def forward(self, x: Tensor) -> Tensor:
        return readers_of_this_file.product(self, x)


HELPERS: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Helped(lambda _: product),
    "partial": lambda: Helped(lambda m: partial(lambda own, _, x: product(own, x), m)),
    "object": lambda: Helped(lambda _: Product()),
    "of a list": lambda: Listed(lambda _: [product]),
    "method": lambda: ByMethod(lambda _: Product()),
    "closure": lambda: Helped(closure),
    "wrapped": lambda: Helped(lambda _: wraps(product)(lambda *args: product(*args))),
    "of a file": lambda: Qualified(lambda _: None),
}
NO_HELPERS = {
    "another function": lambda: Helped(lambda _: lambda module, x: x + 1),
    "of torch": lambda: Helped(lambda _: nn.functional.linear),
}


def hook(*_: Any) -> None: ...


@contextmanager
def registered(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


HOOKS = {
    "function": hook,
    "partial": partial(hook, 1),
    "disabled": torch.compiler.disable(hook),
    "wrapped": wraps(hook)(lambda *_: None),
}


def test_a_forward_that_names_a_weight() -> None:
    """Not one that is compiled, by itself or in a module around it."""
    model = Calls()
    readers = EagerReaders(model)
    with pytest.warns(RuntimeWarning, match="the forward of 'reads' may read weights"):
        assert set(readers.find()) == {model.reads}
    for compiled in (model, model.reads):
        compiled.compile(backend="eager")
        assert not readers.find()
        compiled._compiled_call_impl = None


@pytest.mark.parametrize("name", HELPERS)
def test_a_forward_whose_helper_names_a_weight(name: str) -> None:
    model = HELPERS[name]()
    with pytest.warns(RuntimeWarning, match=f"the forward of '{type(model).__name__}' may read"):
        assert model in EagerReaders(model).find()


@pytest.mark.parametrize("name", NO_HELPERS)
def test_a_helper_that_names_none(name: str) -> None:
    model = NO_HELPERS[name]()
    model.reads.compile(backend="eager")
    assert not EagerReaders(model).find()


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
def test_hooks(kind: str, name: str) -> None:
    """Hooks of a module run while the weights of modules around it are gathered, too; and all hooks
    while weights are gathered that FSDP2 keeps."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    inner, outer = model
    readers = EagerReaders(model)
    handle = getattr(inner[0], f"register_{kind}")(HOOKS[name])
    with pytest.warns(RuntimeWarning, match="hook' of '0.0' may read weights"):
        found = readers.find()
    assert set(found) == {inner[0]}
    assert readers.may_read(found, model, is_kept=False)
    assert readers.may_read(found, inner, is_kept=False)
    assert not readers.may_read(found, outer, is_kept=False)
    assert readers.may_read(found, outer, is_kept=True)
    inner.compile(backend="eager")
    assert set(readers.find()) == set(model.modules())
    handle.remove()
    assert not readers.find()


def test_hooks_of_all_modules_and_of_torch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    readers = EagerReaders(model)
    with registered(register_module_forward_hook(hook)), pytest.warns(RuntimeWarning):
        assert set(readers.find()) == set(model.modules())
    assert not readers.find()
    nn.utils.spectral_norm(model[1])
    assert set(readers.find()) == {model[1]}
