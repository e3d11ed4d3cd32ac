# SPDX-License-Identifier: Apache-2.0
"""The number of the current training step, for each model that is trained.

A step ends when an optimizer that holds a parameter of a recorded graph steps. All optimizers that
step before the next training forward (Muon and AdamW) count as one step, and all micro-batches of
an accumulated gradient belong to one step. `optimizer_steps` finds optimizers and counts their
steps. If none is found, a step ends when the version counter of a parameter changes. A program
whose optimizer shows neither, or that replays the optimizer in a CUDA graph of its own, calls
`step` after each step; from the first such call on, nothing else counts, for any model.

Every model has a `Clock`, whose steps are counted from 0; a model that is recompiled continues the
count. Graphs belong to one model if they were compiled for it, or if one optimizer trains them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.errors import ConfigError, shown
from q2compile.torch_internals.optimizer_steps import Holders, Steps, look_up_optimizers


class Clock:
    """The steps of one model.

    calls  training forwards so far
    seen   the steps of each of its optimizers up to now
    """

    def __init__(self) -> None:
        self.counted, self.calls = 0, 0
        self.seen: weakref.WeakKeyDictionary[Steps, int] = weakref.WeakKeyDictionary()

    @property
    def number(self) -> int:
        """The number of the step that runs now."""
        return self.counted if _Said.number is None else _Said.number

    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last call."""
        counts = {steps: steps.count for steps in list(self.seen)}
        stepped = any(self.seen[steps] != count for steps, count in counts.items())
        self.seen.update(counts)
        return stepped


class _Said:
    """The number that `step` was told last; None before."""

    number: int | None = None


_clocks: list[Clock] = []
_of_root: Any = WeakIdKeyDictionary()  # model -> its Clock


def restart() -> None:
    """Count steps from 0 again, as in a new process, by the steps of optimizers."""
    _Said.number = None
    _clocks.clear()
    _of_root.clear()


def of_model(root: nn.Module | None, w: Tensor | None) -> Clock:
    """The clock of the model that a graph was compiled for. root: the model, None if it is not
    known; w: a parameter of the graph."""
    known: Clock | None = _of_root.get(root) if root is not None else None
    clock = known or of_parameter(w)
    if root is not None:
        _of_root[root] = clock
    return clock


def of_parameter(w: Tensor | None) -> Clock:
    """The clock of the model whose optimizer trains ``w``, or a new one."""
    if w is not None and _clocks:
        if known := _of_known_optimizers(w):
            return known
        look_up_optimizers(at_once=True)
        if known := _of_known_optimizers(w):
            return known
    _clocks.append(Clock())
    return _clocks[-1]


def _of_known_optimizers(w: Tensor) -> Clock | None:
    own = set(Holders().known(w))
    return next((clock for clock in _clocks if own & set(clock.seen)), None)


class Trained:
    """One parameter of a recorded graph, by which the optimizers of the graph are found."""

    def __init__(self, clock: Clock, w: Tensor | None) -> None:
        self.clock = clock
        self._holders = Holders()
        self._steps = () if w is None else self._holders.known(w)
        self._version = self._number = -1

    def look(self, w: Tensor) -> bool:
        """Find the optimizers; whether the version of ``w`` shows a step, where there is none."""
        self._holders.note(w)
        known = tuple(steps for steps in self._steps if steps.is_alive)
        self._steps = self._holders.all(w) or known
        for steps in self._steps:
            self.clock.seen.setdefault(steps, steps.count)
        changed = self._version != w._version and self._number == self.clock.number
        self._version = w._version
        return changed and not known

    def in_step(self, number: int) -> None:
        self._number = number


def trains(trained: Trained, w: Tensor | None) -> int:
    """The number of the step that runs now, for a training forward.

    w: the parameter of ``trained``; None in a call that has others.
    """
    clock = trained.clock
    stepped = clock.have_stepped()
    changed = w is not None and trained.look(w)
    if stepped or changed:
        clock.counted += 1
    trained.in_step(clock.number)
    clock.calls += 1
    return clock.number


def calls_without_a_step() -> int:
    """How many training forwards a model had of which no step has ended so far, at most."""
    still = [c for c in _clocks if c.number == 0 and not c.have_stepped()]
    return max((c.calls for c in still if _Said.number is None), default=0)


def step(number: int | None = None) -> None:
    """Say that a training step has ended. ``number`` is the one that begins now, for a run that is
    resumed; by default the next. It holds for all models of the process.

    Raises ValueError unless it is a whole number from 0 on.
    """
    if number is not None and (type(number) is not int or number < 0):
        raise ConfigError(f"step: got {shown(number)}; allowed: a whole number from 0 on, or none")
    if number is None:
        number = 1 + max((clock.number for clock in _clocks), default=_Said.number or 0)
    _Said.number = number
