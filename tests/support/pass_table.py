# SPDX-License-Identifier: Apache-2.0
"""The pass table of q2compile, with a row replaced for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

from q2compile import passes


def replace_pass(patch: pytest.MonkeyPatch, name: str, run: Callable[[fx.Graph], object]) -> None:
    """Have the passes of this name do something else."""
    rows = [replace(row, run=run) if row.name == name else row for row in passes.PASSES]
    assert rows != list(passes.PASSES), f"no pass {name!r}"
    patch.setattr(passes, "PASSES", tuple(rows))
