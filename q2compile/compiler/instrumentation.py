# SPDX-License-Identifier: Apache-2.0
"""Instrumentation: a graph is compiled twice, once to record what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx


class Instrumentation(Protocol):
    """Two variants of a graph that compute the same; ``recording`` tells them apart."""

    @property
    def records(self) -> bool:
        """Whether there is a recording variant at all."""

    def insert(self, graph: fx.Graph, kind: str, recording: bool) -> None:
        """Change a "forward" or "backward" graph in place, after all passes."""

    def key(self, recording: bool) -> str:
        """The part of a cache key that stands for that change."""

    def choose(self, plain: Callable[..., Any], recording: Callable[..., Any]) -> Any:
        """The callable that runs one or the other."""
