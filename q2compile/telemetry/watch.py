# SPDX-License-Identifier: Apache-2.0
"""Finds the first NaN or Inf in the marks of the last steps (`ops.note`), over all graphs.

Marks of STEPS steps stay on the device. Every EVERY steps a copy of them is started, and searched
some steps later, when it has arrived. A finding is reported at most EVERY steps after its step,
plus the few that the copy and the host need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from q2compile.telemetry.copies import HostCopy

STEPS, EVERY = 32, 16


@dataclass(frozen=True, order=True)
class Finding:
    """An operand that was not finite. order: its place in what the program computed."""

    order: tuple[int, ...]
    step: int
    module: str
    gemm: str
    operand: str

    def __str__(self) -> str:
        return (
            f"NaN or Inf first in {self.operand} of {self.gemm} of {self.module}, at step "
            f"{self.step}"
        )


class Watch:
    """One look at a time: `begin` starts the copies, `ended` says what they show."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, str, HostCopy]] | None = None
        self._before = 0
        self._bad = False

    @property
    def looking(self) -> bool:
        return self._copies is not None

    def begin(self, recorders: Iterable[Any], before: int) -> None:
        """Start copying the marks. before: the step that begins now."""
        self._before = before
        self._copies = [(r, kind, copy) for r in recorders for kind, copy in r.marks().items()]

    def ended(self, wait: bool = False) -> Finding | None:
        """The first finding, once per look; None if there is none, or the copies are not there yet.
        A model that stays broken is found once."""
        if self._copies is None or not (wait or all(c.ready for _, _, c in self._copies)):
            return None
        copies, self._copies = self._copies, None
        found = [f for r, kind, c in copies for f in r.findings(kind, c.value, self._before)]
        was_bad, self._bad = self._bad, bool(found)
        if not found:
            return None
        for recorder in {id(r): r for r, _, _ in copies}.values():
            recorder.forget_marks()
        return None if was_bad else min(found)
