# SPDX-License-Identifier: Apache-2.0
"""The folder that a process's records go to.

telemetry/
    rank0.jsonl    a line a record: {"step", "module", "gemm", "operand", "format", statistics...},
                   null where a number is not known. Lines with "event" are others: "start" of a
                   run, "nonfinite" for the first NaN or Inf
    rank0.csv      the same records, if asked for
    summary.json   of rank 0: of each operand the last record that has an error, in short
    tensorboard/rank0/   events, where TensorBoard is installed

Every rank writes files of its own, of what it computes: its shards, its tokens. A run that finds a
folder of an earlier one goes on in its files, as a resumed training does; readers drop what the
earlier run recorded of the same and of later steps. What would mix with the records of another
training that goes on goes to a folder inside this one: process<pid>/ while another process writes
here, and model2/, model3/ ... for further models of this process.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import shlex
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q2compile.errors import ConfigError, shown
from q2compile.recipes.recipe import Operand
from q2compile.report.process_lock import locked
from q2compile.runtime_kernels.numerics.statistics import FIELDS, SUMS, statistics
from q2compile.runtime_kernels.ops.gaussian import gaussian_error
from q2compile.telemetry.clock import Clock, calls_without_a_step
from q2compile.telemetry.copies import HostCopy
from q2compile.telemetry.options import TelemetryOptions
from q2compile.telemetry.watch import EVERY, Finding, Watch
from q2compile.telemetry.writers import Tensorboard, append_csv
from q2compile.torch_internals.ranks import process_rank, world_size

NAMES = ("module", "gemm", "operand", "format")
CHANGED = "changed"
COLUMNS = ("step", *NAMES, *FIELDS, CHANGED)
LOG = logging.getLogger("q2compile")
Row = dict[str, Any]


class TelemetryWarning(UserWarning):
    """A NaN or Inf was found, or something could not be written."""


@dataclass(frozen=True)
class Record:
    """The notes of one call of one graph, being copied to the host.

    rows        (module, gemm, operand, format, index of its statistics)
    statistics  the number of vectors of sums
    weights     the modules of the shares of changed codes that come after them
    data        fp64 [statistics * len(SUMS) + len(weights)]
    """

    step: int
    rows: list[tuple[str, str, str, str, int]]
    statistics: int
    weights: list[str]
    data: HostCopy

    def lines(self) -> list[Row]:
        """A row for each operand."""
        data = self.data.value
        sums = data[: self.statistics * len(SUMS)].view(-1, len(SUMS))
        by_operand = statistics(sums).tolist()
        changed = data[self.statistics * len(SUMS) :].tolist()
        by_module = dict(zip(self.weights, changed, strict=False))
        lines = []
        for *names, index in self.rows:
            row: Row = {"step": self.step, **dict(zip(NAMES, names, strict=True))}
            row |= {name: _known(x) for name, x in zip(FIELDS, by_operand[index], strict=True)}
            is_weight = names[1:3] == ["fprop", "w"]
            row[CHANGED] = _known(by_module.get(names[0], math.nan)) if is_weight else None
            lines.append(row)
        return lines


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


class Folder:
    """One folder; every graph of the process that records into it shares it (`get`)."""

    # A forked process inherits the table, not the folders.
    _open: dict[tuple[int, str, TelemetryOptions, Clock], Folder] = {}

    def __init__(self, options: TelemetryOptions, inside: str = "") -> None:
        self.base = Path(options.to).absolute()
        self.path = self.base / inside
        self.options = options
        self._shown = str(Path(options.to) / inside) if inside else options.to
        self._recorders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: deque[Record] = deque()
        self._watch = Watch()
        self._step = self._watched = -1
        self._started = False
        self._tensorboard: Tensorboard | None = None
        self._last: dict[tuple[str, ...], Row] = {}  # operand -> its last record with an error
        _make(self.path)

    @property
    def has_written(self) -> bool:
        return self._started

    @classmethod
    def get(cls, options: TelemetryOptions, clock: Clock) -> Folder:
        """The folder in which the records of the model of a clock are written."""
        key = (os.getpid(), str(Path(options.to).absolute()), options, clock)
        if key not in cls._open:
            cls._open[key] = cls(options, _inside(options, clock))
        return cls._open[key]

    def join(self, recorder: Any) -> None:
        """Search the marks of a recorder from now on, as long as it lives."""
        self._recorders.add(recorder)

    def add(self, record: Record) -> None:
        """Queues a record; it is written when its data have arrived."""
        self._waiting.append(record)

    def begin(self, step: int) -> None:
        """Called by the first training call of every graph in a step: writes what has arrived, and
        looks at the marks now and then, without waiting."""
        if self._waiting or self._watch.looking:
            self._write_arrived()
        if step == self._step:
            return
        self._step = step
        if self._watched < 0 or step < self._watched:
            self._watched = step
        elif step - self._watched >= EVERY and not self._watch.looking:
            self._watched = step
            self._watch.begin(list(self._recorders), step)

    def flush(self) -> None:
        """Write everything, the marks of this step included; waits for the device."""
        self._write_arrived(wait=True)
        if self._step >= 0:
            self._watch.begin(list(self._recorders), self._step + 1)
            self._write_arrived(wait=True)
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _write_arrived(self, wait: bool = False) -> None:
        arrived = []
        while self._waiting and (wait or self._waiting[0].data.ready):
            arrived += self._waiting.popleft().lines()
        finding = self._watch.ended(wait)
        if finding is not None:
            warnings.warn(f"q2compile: telemetry: {finding}", TelemetryWarning, stacklevel=2)
        if arrived or finding is not None:
            try:
                self._write(arrived, finding)
            except OSError as error:  # no reason to lose a training run
                warnings.warn(
                    f"q2compile: telemetry: {self.path}: {error}; unwritten records are lost",
                    TelemetryWarning,
                    stacklevel=2,
                )

    def _write(self, rows: list[Row], finding: Finding | None) -> None:
        rank = process_rank()
        lines: list[Row] = []
        if not self._started:
            self._start(rank)
            if self.path not in _Folders.begun:  # by other options for the same model
                _Folders.begun.add(self.path)
                lines.append(self._header(rank))
        lines += rows
        if finding is not None:
            lines.append(_event(finding))
        with (self.path / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        if self.options.csv:
            append_csv(self.path / f"rank{rank}.csv", COLUMNS, rows)
        if self._tensorboard is not None:
            self._tensorboard.write(rows, finding)
        if rank == 0:
            self._summarize(rows, finding)

    def _start(self, rank: int) -> None:
        self._started = True
        if self.options.tensorboard:
            self._tensorboard = Tensorboard.where_installed(
                self.path / "tensorboard" / f"rank{rank}", (*FIELDS, CHANGED)
            )
        self._summary: Row = {"ranks": world_size(), "nonfinite": []}

    def _header(self, rank: int) -> Row:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return {"event": "start", "rank": rank, "ranks": world_size(), "time": started} | {
            "every": self.options.every,
            "modules": list(self.options.modules),
        }

    def _summarize(self, rows: list[Row], finding: Finding | None) -> None:
        """The last step, how many operands it has, and the operands with the worst errors. After a
        NaN or Inf the last finite records stay."""
        if finding is not None:
            self._summary["nonfinite"].append(_event(finding))
        if rows:
            last = rows[-1]["step"]
            known = [r for r in rows if r["relative_error"] is not None]
            self._last |= {tuple(r[name] for name in NAMES): r for r in known}
            keys = ("step", "module", "gemm", "operand", "relative_error", "cosine", "saturated")
            worst = sorted(self._last.values(), key=lambda r: -r["relative_error"])[:10]
            self._summary |= {
                "step": last,
                "operands": sum(r["step"] == last for r in known),
                "worst": [{key: row[key] for key in keys} for row in worst],
            }
        path = self.path / "summary.json"
        path.write_text(json.dumps(self._summary, indent=1) + "\n", encoding="utf-8")

    def worst(self) -> str:
        """The operand whose last error is the largest over that of Gaussian data, in a line; ""
        without one."""
        last = ((r, gaussian_error(Operand.parse(r["format"]).scheme)) for r in self._last.values())
        over = [(r["relative_error"] / gaussian, r) for r, gaussian in last if gaussian]
        if not over:
            return ""
        ratio, row = max(over, key=lambda one: one[0])
        return (
            f"worst operand: {row['operand']} of {row['gemm']} of {row['module']}, relative error "
            f"{row['relative_error']:.3f} at step {row['step']}, {ratio:.2f} times that of "
            f"Gaussian data; q2compile report {shlex.quote(self._shown)} shows all"
        )


def _event(finding: Finding) -> Row:
    return {
        "event": "nonfinite",
        "step": finding.step,
        "module": finding.module,
        "gemm": finding.gemm,
        "operand": finding.operand,
    }


def flush() -> None:
    """Write all that has been recorded so far, waiting for the device. Done at exit, too."""
    for (process, *_), folder in list(Folder._open.items()):
        if process == os.getpid():
            folder.flush()


class _Folders:
    """The folders in use. A forked process inherits this, and knows its own by the process in keys.

    asked_for  the folders that options name
    models     folder -> the models that record into it, in order
    locks      folder -> the lock of its files, None while another process has it
    begun      folders whose files this process writes to
    """

    asked_for: dict[tuple[int, Path], None] = {}
    models: dict[tuple[int, Path], list[Clock]] = {}
    locks: dict[tuple[int, Path], Any] = {}
    begun: set[Path] = set()


def make(options: TelemetryOptions) -> None:
    """Called when a graph is compiled. Raises ConfigError if the options' folder can't be."""
    path = Path(options.to).absolute()
    _make(path)
    _Folders.asked_for[os.getpid(), path] = None


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a surrogate, which no file system takes
        raise ConfigError(
            f"telemetry: to: {shown(str(path))[1:-1]} is not a folder and can't be created: {error}"
        ) from None


def _inside(options: TelemetryOptions, clock: Clock) -> str:
    """Where in the folder a model's records go, "" for the folder itself."""
    path = Path(options.to).absolute()
    key = os.getpid(), path
    if key not in _Folders.locks:
        _Folders.locks[key] = locked(path / f".rank{process_rank()}")
        if _Folders.locks[key] is None:
            warnings.warn(
                f"q2compile: telemetry: another process records into {path}; the records of this "
                f"one go to {path / _process()}",
                TelemetryWarning,
                stacklevel=2,
            )
    own = Path() if _Folders.locks[key] else Path(_process())
    models = _Folders.models.setdefault(key, [])
    if clock not in models:
        models.append(clock)
    number = 1 + models.index(clock)
    if number == 1:
        return "" if own == Path() else str(own)
    inside = str(own / f"model{number}")
    LOG.info("q2compile: telemetry: the records of another model go to %s", path / inside)
    return inside


def _process() -> str:
    return f"process{os.getpid()}"


def forget_folders() -> None:
    """Forget all folders, as in a new process."""
    Folder._open.clear()
    for lock in _Folders.locks.values():
        if lock is not None:
            lock.close()
    for known in (_Folders.asked_for, _Folders.models, _Folders.locks, _Folders.begun):
        known.clear()


def _at_exit() -> None:
    flush()
    for (process, *_), folder in Folder._open.items():
        if process == os.getpid() and (worst := folder.worst()):
            LOG.info("q2compile: telemetry: %s", worst)
    for process, path in _Folders.asked_for:
        if process != os.getpid():
            continue
        if not any(f.base == path and f.has_written for f in Folder._open.values()):
            warnings.warn(
                f"q2compile: telemetry: nothing was written to {path}: training ran no "
                "quantized linear layer that the option's modules match",
                TelemetryWarning,
                stacklevel=1,
            )
        elif (calls := calls_without_a_step()) > 1:
            warnings.warn(
                f"q2compile: telemetry: {path}: no optimizer step was seen in {calls} training "
                "calls, so all belong to step 0; call q2compile.telemetry.step() after each step",
                TelemetryWarning,
                stacklevel=1,
            )


atexit.register(_at_exit)
