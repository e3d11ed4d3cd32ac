# SPDX-License-Identifier: Apache-2.0
"""Batches that a user gives: each is what a model is called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from q2compile.errors import ConfigError


def all_batches(batches: Any, what: str) -> Iterator[Any]:
    """An iterator over ``batches``, which may be a list, a DataLoader, a generator or an iterator.

    Raises ConfigError, which begins with ``what``, if there is no batch, and for a single batch in
    the place of a collection: a loop over a tensor would take each row for a batch.
    """
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise ConfigError(
            f"{what}: got a {type(batches).__name__} in place of batches; allowed: a list, a "
            "DataLoader or another iterable of batches. Put a single batch into a list"
        )
    rest = iter(batches)
    for first in rest:
        return chain([first], rest)
    raise ConfigError(f"{what}: there is no batch")


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call of the model, from a batch: a mapping of
    keyword arguments, a tuple or list of positional ones, or a single argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
