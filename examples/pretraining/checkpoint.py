# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from which a run goes on to the bit: all that a step reads and changes.

The place in the data is the number of the step (see `batches.Windows`), random bits are drawn from
q2compile's counters, so model, optimizer, schedule, generators, counters and step are all there is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import q2compile
from pretraining.record import replaced


def save(
    file: Path,
    step: int,
    setup: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
) -> None:
    """Write the state after ``step``; a file there before is replaced when this one is complete."""
    state = {
        "step": step,
        "setup": setup,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "generators": generators(model),
        "counters": q2compile.get_rng_state(),
    }
    with replaced(file) as unfinished:
        torch.save(state, unfinished)


def load(
    file: Path,
    setup: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
) -> int:
    """Put the state of a checkpoint in place; returns its step.

    Raises ValueError where the run that wrote it was set up differently.
    """
    state = torch.load(file, map_location="cpu", weights_only=True)
    if state["setup"] != setup:
        differing = [k for k in setup if state["setup"].get(k) != setup[k]]
        raise ValueError(
            f"{file} is of a run with another {', '.join(differing)}: delete it, or write elsewhere"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["generators"]["cpu"])
    if "cuda" in state["generators"]:
        torch.cuda.set_rng_state(state["generators"]["cuda"])
    if "counters" in state:
        q2compile.set_rng_state(state["counters"])
    return state["step"]


def generators(model: nn.Module) -> dict[str, torch.Tensor]:
    """The states of the default generators that a step draws from."""
    states = {"cpu": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states
