# SPDX-License-Identifier: Apache-2.0
"""The loop: one run, from a seed to its result.

As in the Quartet II paper (arXiv 2601.22813): fp32 masters under bf16 autocast, AdamW(0.9, 0.95),
weight decay 0.1, gradients clipped at norm 1.0, and 10% of warm-up followed by a cosine to zero.
The loop never waits for the device but once in `fetch_every` steps, when it reads their losses.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from several_gpus import Team
from torch import Tensor
from tqdm import tqdm

import q2compile
from pretraining import checkpoint
from pretraining.batches import Backwards, Batches, First, prefetched
from pretraining.branching import Stem
from pretraining.linears import feed_back, measure_balances, replace_linears
from pretraining.model import SIZES, build_model
from pretraining.oracle import References, by_references, exact_sums
from pretraining.record import Losses, Point
from pretraining.runs import Run

WARMUP_SHARE = 0.1  # of the steps
COUNTER = 0  # the option seed, of all runs: one counter, which begins elsewhere for each seed


@dataclass(frozen=True)
class Setup:
    """Settings that the runs of a comparison share.

    lr: peak; None is the size's. rounding_seed: seed of the rounding, where it is not the run's
    seed. compile_options: on top of every run's own. oracle: see `oracle`; nothing is compiled
    then."""

    size: str
    vocab: int
    steps: int
    batch: int
    seq: int
    device: str
    lr: float | None = None
    rounding_seed: int | None = None
    compile_options: dict[str, Any] = field(default_factory=dict)
    oracle: bool = False

    @property
    def peak_lr(self) -> float:
        return self.lr or SIZES[self.size].learning_rate

    def options(self, run: Run, late: bool = False) -> dict[str, Any]:
        return {**run.compile_options(SIZES[self.size].layers, late), **self.compile_options}


@dataclass(frozen=True)
class Rhythm:
    """How often what happens between the steps.

    eval_every: steps between two validations.
    eval_batches: of a validation on the way; the last, which a result is made of, takes all. None
    takes all each time.
    fetch_every: steps between two looks at the losses.
    save_every: seconds between two checkpoints; None writes none and starts afresh.
    keep: leave the checkpoint of the last step.
    stop_at: a step after which to leave with a checkpoint. deadline: the same for a time, of
    `time.time`. Both are noticed when losses are looked at.
    """

    eval_every: int
    eval_batches: int | None = None
    fetch_every: int = 1
    save_every: float | None = None
    keep: bool = False
    stop_at: int | None = None
    deadline: float = math.inf


class Stopped(Exception):
    """A run was left, with a checkpoint, before its end."""


class Clock:
    """Marks in the device's own time, so that reading them costs no wait."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Once the device has passed both marks."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero. ``step`` counts from 0."""
    warmup = max(1, int(steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Trainee:
    """A model that trains by one run's options, with one seed after another.

    The seeds share the model's memory and what was compiled for it; `begin` puts new weights in.
    """

    def __init__(self, run: Run, setup: Setup, team: Team, dump: Path | None = None) -> None:
        torch._dynamo.reset()
        self.run, self.setup, self.team, self.dump = run, setup, team, dump
        self.size = SIZES[setup.size]
        self.switch = round(run.late_at * setup.steps) if run.late is not None else setup.steps
        self.compiled: dict[bool, Callable[..., Any]] = {}
        self.model: Any = None  # a transformers model, from `begin` on
        self.peak_bytes = 0  # of all seeds: CUDA graphs allocate when they are recorded, once

    def begin(self, seed: int) -> None:
        """Weights, optimizer and schedule of step 0."""
        setup = self.setup
        torch.manual_seed(seed)
        fresh: torch.nn.Module = build_model(self.size, setup.vocab, setup.seq)
        if self.model is None:
            self.model = fresh.to(setup.device)
            if self.run.linear:
                replace_linears(self.model, self.run.linear, setup.options(self.run))
            self.compiled[False] = self.compile(late=False)
        else:
            self.model.load_state_dict(fresh.state_dict())
        rounding_seed = seed
        if setup.rounding_seed is not None:
            rounding_seed = setup.rounding_seed
            torch.manual_seed(rounding_seed)  # the oracle's come from there
        q2compile.set_rng_state({setup.device: {COUNTER: rounding_seed << 32}})
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=setup.peak_lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True if setup.device.startswith("cuda") and self.team.mesh is None else None,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, setup.steps)
        )

    def perturb(self, seed: int) -> None:
        """Multiply each weight by 1 + ``run.perturbed`` * N(0,1), drawn by the seed."""
        if not self.run.perturbed:
            return
        generator = torch.Generator(self.setup.device).manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=generator, device=weight.device)
                weight.mul_(1 + self.run.perturbed * noise)

    def compile(self, late: bool) -> Callable[..., Any]:
        options = {"seed": COUNTER, **self.setup.options(self.run, late)}
        if self.setup.oracle:
            return by_references(self.model, options)
        if self.dump is not None and self.run.options.get("recipe") != "bf16":
            options = {"dump": str(self.dump / "late" if late else self.dump), **options}
        return self.team.compile(self.model, backend="quartet2", options=options)

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """The precision of a step's forward and backward."""
        if self.setup.oracle:
            with References(), exact_sums():
                yield
        else:
            yield

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """The loss of a batch, with the options of this step."""
        late = step > self.switch
        if late not in self.compiled:
            self.compiled[late] = self.compile(late)
        torch.compiler.cudagraph_mark_step_begin()
        tokens = self.team.share(tokens)
        autocast = not self.setup.oracle
        with torch.autocast(self.setup.device, torch.bfloat16, enabled=autocast):
            return self.compiled[late](input_ids=tokens, labels=tokens).loss

    def measure(self, tokens: Tensor) -> None:
        """Give the run's linear layers what they measure once, in their first batch."""
        with torch.autocast(self.setup.device, torch.bfloat16):
            measure_balances(self.model, lambda: self.model(input_ids=tokens, labels=tokens))

    def train(self, tokens: Tensor, step: int, out: Tensor) -> None:
        """One step; the loss and the norm of the gradient are put into ``out``, fp32 [2]."""
        with self.numerics():
            loss = self.loss(tokens, step)
            loss.backward()
        feed_back(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        out[0], out[1] = self.team.mean(loss.detach()), full(norm)

    def evaluate(self, batches: Batches, step: int) -> list[float]:
        """The loss of each validation batch.

        Gradients stay enabled: the graph that trains also evaluates, and nothing compiles twice.
        """
        losses = torch.empty(len(batches), device=self.setup.device)
        with prefetched(batches, 0, self.setup.device) as source, self.numerics():
            for index, tokens in enumerate(source):
                losses[index] = self.team.mean(self.loss(tokens, step).detach())
        return losses.tolist()


def full(norm: Tensor) -> Tensor:
    """The norm itself where the parameters are DTensors."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    diverged_at: int
    val_losses: list[float]
    peak_bytes: int


class Loop:
    """Trains a trainee from where it is to the last step, and writes down every step."""

    def __init__(
        self,
        trainee: Trainee,
        seed: int,
        rhythm: Rhythm,
        folder: Path,
        identity: dict[str, Any],
        stem: Stem | None = None,
    ) -> None:
        """folder: for losses.csv and the checkpoint. identity: what a checkpoint must agree in.
        stem: where a run without a checkpoint starts; None is step 0."""
        self.trainee, self.rhythm, self.folder, self.stem = trainee, rhythm, folder, stem
        self.identity = {**identity, "seed": seed}
        self.steps, self.device = trainee.setup.steps, trainee.setup.device
        self.clock = Clock(self.device)
        trainee.begin(seed)
        resumes = rhythm.save_every is not None and self.checkpoint.exists()
        self.step = self.resume(seed, resumes)
        rows_until = self.step if resumes else 0
        self.losses = Losses.start(
            folder / "losses.csv", until=rows_until, quiet=not trainee.team.leads
        )
        self.saved_at = time.monotonic()
        self.fetched = torch.zeros(rhythm.fetch_every, 2, device=self.device)
        self.pending: list[tuple[int, float, Any, Any]] = []  # step, lr, start, end
        self.val_losses: list[float] = []
        self.diverged_at = 0

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def resume(self, seed: int, resumes: bool) -> int:
        """The step to go on from: the run's own checkpoint's, else the stem's, else 0."""
        if resumes:
            return checkpoint.load(self.checkpoint, self.identity, *self.state())
        if self.stem is None:
            return 0
        step = checkpoint.load(self.stem.checkpoint, self.stem.definition, *self.state())
        self.trainee.perturb(seed)
        return step

    def state(self) -> tuple[Any, Any, Any]:
        return self.trainee.model, self.trainee.optimizer, self.trainee.schedule

    def save(self) -> None:
        checkpoint.save(self.checkpoint, self.step, self.identity, *self.state())
        self.saved_at = time.monotonic()

    def train(self, batches: Batches, val_batches: Batches, bar: tqdm) -> Outcome:
        """Raises Stopped at the rhythm's stop_at or deadline, after writing a checkpoint."""
        if self.trainee.run.backwards:
            batches = Backwards(batches)
        bar.update(self.step)
        first = self.step
        with prefetched(batches, self.step, self.device) as source:
            start = self.clock.mark()
            for tokens in source:
                lr = float(self.trainee.schedule.get_last_lr()[0])
                if self.step == first:
                    self.trainee.measure(tokens)
                self.trainee.train(tokens, self.step + 1, self.fetched[len(self.pending)])
                self.step += 1
                end = self.clock.mark()
                self.pending.append((self.step, lr, start, end))
                start = end
                if self.step == first + 1 and self.clock.cuda:  # it compiled; graphs come next
                    torch.cuda.reset_peak_memory_stats()
                if self.pause_due():
                    self.pause(val_batches, bar)
                    start = self.clock.mark()
                if self.diverged_at:
                    break
        if self.clock.cuda:
            peak = torch.cuda.max_memory_allocated()
            self.trainee.peak_bytes = max(self.trainee.peak_bytes, peak)
        losses = [] if self.diverged_at else self.val_losses
        return Outcome(self.diverged_at, losses, self.trainee.peak_bytes)

    def pause_due(self) -> bool:
        every = self.rhythm.eval_every
        full_buffer = len(self.pending) == self.rhythm.fetch_every
        asked = self.step % every == 0 or self.step in (self.steps, self.rhythm.stop_at)
        # The first step compiled: say what it gave before many more.
        return full_buffer or asked or len(self.pending) == self.step == 1

    def pause(self, val_batches: Batches, bar: tqdm) -> None:
        """Read the losses of the steps since the last pause, and do what is due between steps."""
        self.fetch(bar)
        if self.diverged_at:
            return
        if self.step % self.rhythm.eval_every == 0 or self.step == self.steps:
            self.validate(val_batches, bar)
        if self.rhythm.save_every is None:
            return
        if self.step == self.steps:
            if self.rhythm.keep:
                self.save()
            return
        late = time.time() >= self.rhythm.deadline
        if late or self.step == self.rhythm.stop_at:
            self.save()
            raise Stopped(f"stopped after step {self.step} of {self.steps}")
        if time.monotonic() - self.saved_at >= self.rhythm.save_every:
            self.save()

    def fetch(self, bar: tqdm) -> None:
        values = self.fetched[: len(self.pending)].tolist()  # waits for the device
        points = [
            Point(step, "train", loss, norm, lr, self.clock.seconds(start, end))
            for (step, lr, start, end), (loss, norm) in zip(self.pending, values, strict=True)
        ]
        for point in points:
            if not math.isfinite(point.loss):
                points = points[: points.index(point) + 1]
                self.diverged_at = point.step
                break
        self.losses.add(points)
        bar.update(len(self.pending))
        self.pending.clear()
        seconds = statistics.median(point.seconds for point in points)
        tokens = self.trainee.setup.batch * self.trainee.setup.seq
        bar.set_postfix(
            {"train": f"{points[-1].loss:.3f}", "tokens/s": f"{tokens / seconds:,.0f}"},
            refresh=False,
        )

    def validate(self, batches: Batches, bar: tqdm) -> None:
        start = time.perf_counter()
        if self.step < self.steps and self.rhythm.eval_batches is not None:
            batches = First(batches, self.rhythm.eval_batches)
        self.val_losses = self.trainee.evaluate(batches, self.step)
        loss, seconds = statistics.fmean(self.val_losses), time.perf_counter() - start
        lr = float(self.trainee.schedule.get_last_lr()[0])
        self.losses.add([Point(self.step, "val", loss, math.nan, lr, seconds)])
        if bar.disable:  # has no description
            return
        bar.set_description(f"{bar.desc.split(',')[0]}, val {loss:.3f}", refresh=False)


def progress_bar(steps: int, description: str, line: int = 0, hidden: bool = False) -> tqdm:
    """On a terminal a live bar; in a log file a line every few seconds."""
    interval = 0.2 if sys.stderr.isatty() else 15.0
    return tqdm(
        total=steps,
        desc=description,
        unit="step",
        mininterval=interval,
        position=line,
        disable=hidden,
    )
