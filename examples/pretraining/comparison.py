# SPDX-License-Identifier: Apache-2.0
"""A comparison: runs x seeds in one folder, each from the same weights and on the same batches.

The runs of a seed start from fresh weights, or from the seed's stem (see `branching`).
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from several_gpus import Team

from pretraining.batches import Batches
from pretraining.branching import Branch, Stem
from pretraining.record import Losses, Result
from pretraining.results import Finished, run_folder
from pretraining.runs import RUNS, Run
from pretraining.training import (
    Loop,
    Outcome,
    Rhythm,
    Setup,
    Stopped,
    Trainee,
    progress_bar,
)

STEM = RUNS["bf16"]


@dataclass(frozen=True)
class Data:
    """The batches of a comparison. facts: what a result says of the text they are of."""

    train: Callable[[int], Batches]  # of a seed
    val: Batches
    facts: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Settings that the runs of one folder share.

    dump: whether each run writes its graphs and its report into folder/graphs/NAME.
    branch: where the runs leave the stems; None starts them from fresh weights.
    """

    folder: Path
    setup: Setup
    rhythm: Rhythm
    data: Data
    team: Team
    command: str
    dump: bool = False
    branch: Branch | None = None

    def identity(self, run: Run, seed: int) -> dict[str, Any]:
        """Settings in which a checkpoint or result must agree with a run that resumes from it."""
        same = {"run": asdict(run), "setup": asdict(self.setup), "data": self.data.facts}
        stem = self.stem(seed)
        return {**same, "stem": stem.weights_hash} if stem else same

    def stem(self, seed: int) -> Stem | None:
        """The stem that the runs of a seed start from; None where they start from fresh weights."""
        if self.branch is None:
            return None
        definition = {
            "options": self.setup.options(STEM),
            "setup": asdict(self.setup),
            "corpus": self.data.facts.get("corpus"),
            "seed": seed,
            "torch": version("torch"),
        }
        return self.branch.stem(definition)

    def missing_stems(self, seeds: Sequence[int]) -> list[int]:
        """The seeds whose stem is yet to be trained."""
        return [seed for seed in seeds if (stem := self.stem(seed)) and not stem.is_trained]

    def train_stems(self, seeds: Sequence[int], bar: int = 0) -> None:
        """Train the stems that are missing; what was compiled serves all of them.

        Raises training.Stopped when it is time to leave; the next call goes on from there.
        """
        trainee: Trainee | None = None
        for seed in self.missing_stems(seeds):
            stem = self.stem(seed)
            assert self.branch is not None and stem is not None
            stem.folder.mkdir(parents=True, exist_ok=True)
            trainee = trainee or Trainee(STEM, self.setup, self.team)
            rhythm = replace(
                self.rhythm, eval_every=self.setup.steps, stop_at=self.branch.step, save_every=1e9
            )
            loop = Loop(trainee, seed, rhythm, stem.folder, stem.definition)
            title = f"stem of seed {seed}"
            with progress_bar(self.setup.steps, title, bar, not self.team.leads) as shown:
                try:
                    if loop.step < self.branch.step:
                        loop.train(self.data.train(seed), self.data.val, shown)
                except Stopped:
                    if loop.step < self.branch.step:
                        raise
            stem.finish(trainee.model.state_dict())

    def is_finished(self, run: Run, seed: int) -> bool:
        """Raises ValueError where the folder has this run with other settings."""
        file = run_folder(self.folder, run.name, seed) / "result.json"
        if self.rhythm.save_every is None or not file.exists():
            return False
        result = Result.read(file)
        found = {"run": result.run, "setup": result.setup, "data": result.provenance["data"]}
        found["stem"] = result.provenance.get("stem")
        wanted = {"stem": None, **self.identity(run, seed)}
        differing = [key for key, value in wanted.items() if found[key] != value]
        if differing:
            raise ValueError(
                f"{file} is of a run with another {' and another '.join(differing)}: delete it, or "
                "give another --out"
            )
        return True

    def train(self, run: Run, seeds: Sequence[int], bar: int = 0) -> Iterator[Finished]:
        """Train the seeds that have not finished; what was compiled serves all of them.

        Raises training.Stopped when it is time to leave; the next call goes on from there.
        bar: the line of the progress bar, where several processes draw one.
        """
        dump = self.folder / "graphs" / run.name if self.dump else None
        trainee: Trainee | None = None
        for seed in seeds:
            if self.is_finished(run, seed):
                continue
            trainee = trainee or Trainee(run, self.setup, self.team, dump)
            yield self.train_seed(trainee, seed, bar)

    def train_seed(self, trainee: Trainee, seed: int, bar: int) -> Finished:
        folder = run_folder(self.folder, trainee.run.name, seed)
        folder.mkdir(parents=True, exist_ok=True)
        identity, stem = self.identity(trainee.run, seed), self.stem(seed)
        loop = Loop(trainee, seed, self.rhythm, folder, identity, stem)
        title = f"{trainee.run.name} seed {seed}"
        with progress_bar(self.setup.steps, title, bar, hidden=not self.team.leads) as shown:
            outcome = loop.train(self.data.train(seed), self.data.val, shown)
        result = self.result(trainee.run, seed, outcome, loop.losses)
        if self.team.leads:
            result.write(folder / "result.json")
            if not self.rhythm.keep:
                loop.checkpoint.unlink(missing_ok=True)
        return Finished(result, loop.losses)

    def result(self, run: Run, seed: int, outcome: Outcome, losses: Losses) -> Result:
        seconds = losses.step_seconds
        val = outcome.val_losses
        return Result(
            run=asdict(run),
            setup=asdict(self.setup),
            seed=seed,
            diverged_at=outcome.diverged_at,
            val_loss=sum(val) / len(val) if val else float("nan"),
            val_losses=val,
            step_seconds=seconds,
            first_step_seconds=losses.first_step_seconds,
            tokens_per_second=self.setup.batch * self.setup.seq / seconds,
            peak_bytes=outcome.peak_bytes,
            provenance={
                "command": self.command,
                "data": self.data.facts,
                **self.branched(seed),
                **environment(),
            },
        )

    def branched(self, seed: int) -> dict[str, Any]:
        """The branch step of a branched run, and the hash of its stem's weights."""
        stem = self.stem(seed)
        if self.branch is None or stem is None:
            return {}
        return {"branch": self.branch.step, "stem": stem.weights_hash}


def environment() -> dict[str, Any]:
    """Where and with what something was measured."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("q2compile", "torch", "transformers")},
            **({"cuda": torch.version.cuda} if cuda else {}),
        },
        "date": datetime.date.today().isoformat(),
    }
