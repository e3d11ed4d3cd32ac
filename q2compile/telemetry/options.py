# SPDX-License-Identifier: Apache-2.0
"""The option ``telemetry``, parsed strictly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from q2compile.errors import ConfigError, naming, one_of, shown
from q2compile.recipes.policy import compiled_pattern


class TelemetryMapping(TypedDict, total=False):
    """The value of the option ``telemetry``, for type checkers: see `TelemetryOptions`."""

    every: int
    modules: str | Sequence[str]
    to: str | os.PathLike[str]
    csv: bool
    tensorboard: bool


@dataclass(frozen=True)
class TelemetryOptions:
    """every        record at the steps that are multiples of it; what a step is: `clock`
    modules      a pattern of module names, as in a policy, or a list of them
    to           the folder that the records go to
    csv          write each rank's records as CSV, too
    tensorboard  write events for TensorBoard, too, where it is installed

    Raises ValueError for an unknown key or a value that can't be used.
    """

    every: int = 100
    modules: tuple[str, ...] = ("*",)
    to: str = "telemetry/"
    csv: bool = False
    tensorboard: bool = True

    @classmethod
    def of(cls, given: object) -> TelemetryOptions:
        """Parse the value of the option."""
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"telemetry: got {shown(given)}; allowed: a mapping such as "
                '{"every": 100, "modules": "*", "to": "telemetry/"}, or None'
            )
        for key in given:
            one_of("key of telemetry", key, [f.name for f in fields(cls)])
        with naming("telemetry"):
            values: dict[str, Any] = dict(given)
            _check(values)
        return cls(**values)

    def wants(self, module: str) -> bool:
        return any(compiled_pattern(p).fullmatch(module) for p in self.modules)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of ``names``, in order."""
        names = list(names)
        return [p for p in self.modules if not any(map(compiled_pattern(p).fullmatch, names))]


def _check(values: dict[str, Any]) -> None:
    """Raise for what can't be used; give ``modules`` and ``to`` their plain forms."""
    every = values.get("every", 1)
    if type(every) is not int or every < 1:
        raise ConfigError(f"every: got {shown(every)}; allowed: a whole number of steps, from 1 on")
    modules = values.get("modules", "*")
    patterns = [modules] if isinstance(modules, str) else modules
    if not isinstance(patterns, list | tuple) or not patterns:
        raise ConfigError(f"modules: got {shown(modules)}; allowed: a pattern, or a list of them")
    with naming("modules"):
        for pattern in patterns:
            compiled_pattern(pattern)
    if "modules" in values:
        values["modules"] = tuple(patterns)
    if isinstance(values.get("to"), os.PathLike):
        values["to"] = os.fspath(values["to"])
    to = values.get("to", "telemetry/")
    if not isinstance(to, str) or not to or "\0" in to:
        raise ConfigError(f"to: got {shown(to)}; allowed: a folder's path")
    for name in ("csv", "tensorboard"):
        if not isinstance(values.get(name, True), bool):
            raise ConfigError(f"{name}: got {shown(values[name])}; allowed: True, False")
