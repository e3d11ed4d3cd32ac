# SPDX-License-Identifier: Apache-2.0
"""Whether the loop is the bottleneck: its tokens/s over those of the bare compiled step.

The bare step is forward, backward, clipping and the optimizer on one batch that stays on the
device. The loop does the same and reads its batches, keeps and writes losses, norms and times, and
shows them. Validations and checkpoints are left out of both.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pretraining.comparison import Comparison
from pretraining.record import UNTIMED_STEPS
from pretraining.runs import Run
from pretraining.training import Loop, Trainee, progress_bar

ROUNDS = 3  # of each, in turns: the best of each counts


@dataclass(frozen=True)
class Throughput:
    """Tokens per second."""

    run: str
    bare: float
    loop: float

    def __str__(self) -> str:
        return (
            f"{self.run}: bare compiled step {self.bare:,.0f} tokens/s, loop {self.loop:,.0f}: "
            f"{100 * self.loop / self.bare:.1f}%"
        )


def measure(compared: Comparison, run: Run) -> Throughput:
    """Compile once, then time the bare step and the loop in turns, over the setup's steps each."""
    trainee = Trainee(run, compared.setup, compared.team)
    trainee.begin(0)
    steps = compared.setup.steps
    bare_steps(trainee, compared, UNTIMED_STEPS)
    bare, loop = [], []
    for _ in range(ROUNDS):
        bare.append(bare_steps(trainee, compared, steps))
        loop.append(loop_steps(trainee, compared))
    tokens = steps * compared.setup.batch * compared.setup.seq
    return Throughput(run.name, tokens / min(bare), tokens / min(loop))


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def bare_steps(trainee: Trainee, compared: Comparison, steps: int) -> float:
    """Seconds."""
    device = compared.setup.device
    tokens = compared.data.train(0)[0].to(device)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        trainee.loss(tokens, 1).backward()
        torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
    synchronize(device)
    return time.perf_counter() - start


def loop_steps(trainee: Trainee, compared: Comparison) -> float:
    """Seconds, without those of the validation at the end."""
    rhythm = replace(compared.rhythm, eval_every=compared.setup.steps, save_every=None)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(trainee, 0, rhythm, Path(folder), {})
        with progress_bar(compared.setup.steps, f"{trainee.run.name}, the loop") as bar:
            start = time.perf_counter()
            loop.train(compared.data.train(0), compared.data.val, bar)
            seconds = time.perf_counter() - start
    return seconds - sum(p.seconds for p in loop.losses.points if p.split == "val")
