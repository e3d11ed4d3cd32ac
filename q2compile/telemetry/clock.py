"""Which training step it is.

A step ends when an optimizer steps: the first step of any torch.optim.Optimizer after a forward
that was compiled with telemetry counts, so several optimizers of one step (Muon and AdamW) count
once, and all micro-batches of an accumulated gradient belong to one step. Who trains without
torch.optim, or replays the optimizer in a CUDA graph of his own, calls `step` after each step;
from the first such call on optimizers are not listened to. Steps are counted from 0, for the
process: a model that is compiled again goes on where it was.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from q2compile.errors import ConfigError, shown


class _Clock:
    """number: of the step that runs now. trained: there was a forward in it. own: `step` was
    called."""

    def __init__(self) -> None:
        self.number, self.trained, self.own = 0, False, False


_clock = _Clock()


def step(number: int | None = None) -> None:
    """A training step has ended. ``number`` is the one that begins now, for a run that is resumed;
    by default the next.

    Raises ValueError for what is no number of a step.
    """
    if number is not None and (type(number) is not int or number < 0):
        raise ConfigError(f"step: got {shown(number)}; allowed: a whole number from 0 on, or none")
    _clock.own = True
    _clock.number = _clock.number + 1 if number is None else number
    _clock.trained = False


def trains() -> int:
    """The number of the step that runs now, for a training forward: only what trained can end."""
    _clock.trained = True
    return _clock.number


def restart() -> None:
    """Count from 0 again, and listen to optimizers."""
    _clock.__init__()  # type: ignore[misc]


def _after_step(*_: Any) -> None:
    if _clock.trained and not _clock.own:
        _clock.number += 1
        _clock.trained = False


register_optimizer_step_post_hook(_after_step)
