# SPDX-License-Identifier: Apache-2.0
"""Work that one rank does for all that export the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from q2compile.errors import ConfigError

Result = TypeVar("Result")
Value = TypeVar("Value")


class Ranks:
    """The ranks that export into one folder: all ranks of the default group, or those that hold one
    pipeline stage. The first of them writes.

    Every rank of the default group makes one of these at the same place. Raises ConfigError on the
    ranks that would write other models into the folder than its first rank does.
    """

    def __init__(self, folder: object, model: nn.Module) -> None:
        self._many = dist.is_available() and dist.is_initialized()
        held = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        given = self._of_all((str(folder), held))
        self._same = [rank for rank, (path, _) in enumerate(given) if path == str(folder)]
        self._first = self._same[0]
        self._is_first = not self._many or dist.get_rank() == self._first
        if any(given[rank][1] != given[self._first][1] for rank in self._same):
            raise ConfigError(
                f"export: ranks {', '.join(map(str, self._same))} export models with different "
                f"parameters into {folder}; give each pipeline stage a folder of its own"
            )

    def _of_all(self, value: Any) -> list[Any]:
        """The values of all ranks of the default group, whatever they export."""
        values = [value]
        if self._many:
            values *= dist.get_world_size()
            dist.all_gather_object(values, value)
        return values

    def of_each(self, value: Value) -> list[Value]:
        """The values of the ranks that export the same model."""
        values = self._of_all(value)
        return [values[rank] for rank in self._same]

    def largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest value of each name on the ranks that export the same model. They may run
        different batches, which reach different experts."""
        found: dict[str, float] = {}
        for of_rank in self.of_each(values):
            for name, value in of_rank.items():
                found[name] = max(found.get(name, 0.0), value)
        return found

    def on_first(
        self, call: Callable[[], Result], meanwhile: Callable[[], Any] = lambda: None
    ) -> Result:
        """Runs ``call`` on the first rank and returns its result on all that export the same model.

        Every rank runs ``meanwhile``, the first after ``call``, even if that raised: collectives
        that belong to it. An error is raised on all ranks, on the others as a ConfigError of its
        message.
        """
        error: Exception | None = None
        outcome: tuple[Any, str | None] = None, None  # result, message
        if self._is_first:
            try:
                outcome = call(), None
            except Exception as raised:
                error, outcome = raised, (None, str(raised))
        meanwhile()
        result, message = self.of_each(outcome)[0]
        if error is not None:
            raise error
        if message is not None:
            raise ConfigError(f"on rank {self._first}: {message}")
        found: Result = result
        return found
