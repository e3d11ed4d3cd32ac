"""A comparison: runs x seeds in one folder, each from the same weights and on the same batches."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from several_gpus import Team

from pretraining.batches import Batches
from pretraining.record import Losses, Result
from pretraining.results import Finished, run_folder
from pretraining.runs import Run
from pretraining.training import Loop, Outcome, Rhythm, Setup, Trainee, progress_bar


@dataclass(frozen=True)
class Data:
    """The batches of a comparison. facts: what a result says of the text they are of."""

    train: Callable[[int], Batches]  # of a seed
    val: Batches
    facts: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What the runs of one folder share.

    dump: whether each run writes its graphs and its report into folder/graphs/NAME.
    """

    folder: Path
    setup: Setup
    rhythm: Rhythm
    data: Data
    team: Team
    command: str
    dump: bool = False

    def identity(self, run: Run) -> dict[str, Any]:
        """What a checkpoint and a result must agree in for a run to go on from it."""
        return {"run": asdict(run), "setup": asdict(self.setup), "data": self.data.facts}

    def is_finished(self, run: Run, seed: int) -> bool:
        """Raises ValueError where the folder has this run with other settings."""
        file = run_folder(self.folder, run.name, seed) / "result.json"
        if self.rhythm.save_every is None or not file.exists():
            return False
        result = Result.read(file)
        found = {"run": result.run, "setup": result.setup, "data": result.provenance["data"]}
        differing = [key for key, value in self.identity(run).items() if found[key] != value]
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
        loop = Loop(trainee, seed, self.rhythm, folder, self.identity(trainee.run))
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
            provenance={"command": self.command, "data": self.data.facts, **environment()},
        )


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
