# SPDX-License-Identifier: Apache-2.0
"""Kernels of a GPU that is not there, for passes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from q2compile.graph import nodes


def serve_by(monkeypatch: pytest.MonkeyPatch, serving: Callable[[str, Any], Any]) -> None:
    """Passes get ``serving(op, args)`` as the kernel that would run an op."""
    monkeypatch.setattr(nodes, "choose", lambda op, args, graph: serving(op, args))
