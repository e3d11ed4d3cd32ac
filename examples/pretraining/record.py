# SPDX-License-Identifier: Apache-2.0
"""The files of a run: losses.csv, one row per step, and result.json at its end."""

from __future__ import annotations

import csv
import json
import os
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

UNTIMED_STEPS = 3  # the first step of a run compiles, the next ones allocate and record graphs


@dataclass(frozen=True)
class Point:
    """One row of losses.csv."""

    step: int
    split: str  # train: the loss of one batch; val: the mean over the validation batches
    loss: float  # nats per token
    grad_norm: float  # before clipping; NaN in a row of val
    lr: float
    seconds: float  # of the training step, or of the evaluation


_CONVERT = {"int": int, "str": str, "float": float}  # annotations are text


@dataclass
class Losses:
    """losses.csv: written row by row, read back by whoever wants curves.

    quiet: keep the rows and write none, in all processes of a team but one.
    """

    file: Path
    points: list[Point] = field(default_factory=list)
    quiet: bool = False

    @classmethod
    def read(cls, file: Path) -> Losses:
        with open(file, newline="", encoding="utf-8") as source:
            rows = list(csv.DictReader(source))
        columns = {column.name: _CONVERT[str(column.type)] for column in fields(Point)}
        complete = (row for row in rows if None not in row.values())  # a kill may cut the last one
        return cls(
            file, [Point(**{k: to(row[k]) for k, to in columns.items()}) for row in complete]
        )

    @classmethod
    def start(cls, file: Path, until: int = 0, quiet: bool = False) -> Losses:
        """A file to go on writing, with the rows it has up to step ``until``."""
        kept = [p for p in cls.read(file).points if p.step <= until] if until else []
        losses = cls(file, kept, quiet)
        if not quiet:
            with replaced(file) as name, open(name, "w", newline="", encoding="utf-8") as output:
                csv.writer(output).writerow([column.name for column in fields(Point)])
                csv.writer(output).writerows(astuple(point) for point in kept)
        return losses

    def add(self, points: Iterable[Point]) -> None:
        new = list(points)
        self.points += new
        if self.quiet:
            return
        with open(self.file, "a", newline="", encoding="utf-8") as output:
            csv.writer(output).writerows(astuple(point) for point in new)

    def of(self, split: str) -> tuple[list[int], list[float]]:
        """(steps, losses) of a split."""
        points = [point for point in self.points if point.split == split]
        return [point.step for point in points], [point.loss for point in points]

    @property
    def first_step_seconds(self) -> float:
        """The first step compiles."""
        return self.points[0].seconds

    @property
    def step_seconds(self) -> float:
        """Median over the steps that neither compile nor warm up."""
        timed = [p.seconds for p in self.points if p.split == "train" and p.step > UNTIMED_STEPS]
        return statistics.median(timed) if timed else float("nan")


@dataclass(frozen=True)
class Result:
    """result.json: one finished run.

    run: the fields of its `runs.Run`. setup: size, steps, batch, seq, lr and whatever else two runs
    must share to be compared. val_losses: of each validation batch at the end, so that two runs
    are compared batch by batch. diverged_at: the step whose loss was not finite; 0 if none was.
    peak_bytes: device memory allocated at most in a step that did not compile, the one that records
    CUDA graphs included; 0 on a CPU.
    """

    run: dict[str, Any]
    setup: dict[str, Any]
    seed: int
    diverged_at: int
    val_loss: float
    val_losses: list[float]
    step_seconds: float
    first_step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    provenance: dict[str, Any]

    @property
    def name(self) -> str:
        return self.run["name"]

    def write(self, file: Path) -> None:
        with replaced(file) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Result:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def without_folders(command: str) -> str:
    """A command as it would be typed in the folder that all its absolute paths share.

    pretrain.py train --corpus /data/me/corpus --out /data/me/runs/a
    pretrain.py train --corpus corpus --out runs/a
    """
    words = shlex.split(command)
    starts = [word.rpartition("=")[0] + "=" if "=/" in word else "" for word in words]  # --out=/...
    paths = [word[len(start) :] for word, start in zip(words, starts, strict=True)]
    absolute = [path for path in paths if os.path.isabs(path)]
    if not absolute:
        return command
    common = os.path.commonpath([os.path.dirname(path.rstrip("/")) for path in absolute])
    return shlex.join(
        start + (os.path.relpath(path, common) if os.path.isabs(path) else path)
        for start, path in zip(starts, paths, strict=True)
    )


class replaced:
    """``with replaced(file) as name``: write ``name``; the file is replaced when it is complete."""

    def __init__(self, file: Path) -> None:
        self.file, self.unfinished = file, file.with_name(f"{file.name}.{os.getpid()}.unfinished")

    def __enter__(self) -> Path:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.unfinished

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.unfinished.replace(self.file)
        else:
            self.unfinished.unlink(missing_ok=True)
