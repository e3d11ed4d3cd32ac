# SPDX-License-Identifier: Apache-2.0
"""The number of the current training step.

A step ends when an optimizer that holds a parameter of a recorded graph steps. All optimizers that
step before the next training forward (Muon and AdamW) count as one step, and all micro-batches of
an accumulated gradient belong to one step. `optimizer_steps` finds optimizers and counts their
steps. If none is found, a step ends when the version counter of a parameter changes. A program
whose optimizer shows neither, or that replays the optimizer in a CUDA graph of its own, calls
`step` after each step; from the first such call on, nothing else counts. Steps are counted from 0
per process: a model that is recompiled continues the count.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from q2compile.errors import ConfigError, shown
from q2compile.torch_internals.optimizer_steps import Holders, Steps


class _Clock:
    """number: of the step that runs now. calls: training forwards so far. own: `step` was called.
    seen: the steps of each optimizer up to now."""

    def __init__(self) -> None:
        self.number, self.calls, self.own = 0, 0, False
        self.seen: weakref.WeakKeyDictionary[Steps, int] = weakref.WeakKeyDictionary()

    def have_stepped(self) -> bool:
        """Whether an optimizer has, since the last call."""
        counts = {steps: steps.count for steps in list(self.seen)}
        stepped = any(self.seen[steps] != count for steps, count in counts.items())
        self.seen.update(counts)
        return stepped


_clock = _Clock()


def restart() -> None:
    """As in a new process: steps are counted from 0, by the steps of optimizers."""
    global _clock
    _clock = _Clock()


class Trained:
    """One parameter of a recorded graph, by which the optimizers of the graph are found."""

    def __init__(self) -> None:
        self._holders, self._steps = Holders(), tuple[Steps, ...]()
        self._version = self._number = -1

    def look(self, w: Tensor) -> bool:
        """Find the optimizers; whether the version of ``w`` shows a step, where there is none."""
        self._holders.note(w)
        known = self._steps
        self._steps = self._holders.all(w) or known
        for steps in self._steps:
            _clock.seen.setdefault(steps, steps.count)
        changed = self._version != w._version and self._number == _clock.number
        self._version = w._version
        return changed and not known

    def in_step(self, number: int) -> None:
        self._number = number


def trains(trained: Trained, w: Tensor | None) -> int:
    """The number of the step that runs now, for a training forward.

    w: the parameter of ``trained``; None in a call that has others.
    """
    stepped = _clock.have_stepped()
    changed = w is not None and trained.look(w)
    if (stepped or changed) and not _clock.own:
        _clock.number += 1
    trained.in_step(_clock.number)
    _clock.calls += 1
    return _clock.number


def calls_without_a_step() -> int:
    """How many training forwards there were, if no step has ended so far; else 0."""
    stands = _clock.number == 0 and not _clock.own and not _clock.have_stepped()
    return _clock.calls if stands else 0


def step(number: int | None = None) -> None:
    """A training step has ended. ``number`` is the one that begins now, for a run that is resumed;
    by default the next.

    Raises ValueError for what is no number of a step.
    """
    if number is not None and (type(number) is not int or number < 0):
        raise ConfigError(f"step: got {shown(number)}; allowed: a whole number from 0 on, or none")
    _clock.own = True
    _clock.number = _clock.number + 1 if number is None else number
