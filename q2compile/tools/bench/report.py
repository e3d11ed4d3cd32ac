# SPDX-License-Identifier: Apache-2.0
"""The report of `q2compile bench`: one JSON object per line, flushed as each comes, so that a crash
or a hang loses nothing of what was found before it.

    kind       has
    machine    the device, versions of all that compiles or runs kernels, the command, the date
    begun      a group, or one thing in it, that is about to run
    state      clocks, power, temperature and throttling, before and after a group
    row        what was found of one thing (Row)
    ended      how the process of a group ended, and the end of its stderr
    done       nothing is missing

Every line has "at", seconds since the beginning. `faults` says from the lines alone what is wrong
on a machine, `doubts` which times are not to be relied on.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from q2compile.cost_model.ranges import Range
from q2compile.tools.time_words import time_words

SCHEMA = 2
# The text of a row.
MEASURED, PASSED = "measured", "passed"
UNSUPPORTED = "unsupported"  # by this device, or of no use there: no fault
NOISE = "noise"  # lost in the noise of a busy machine: no fault
FAULT = "fault"
_SPREAD = 1.5  # p90 over the median, above which a time is doubted
_BAD_REASONS = {  # clocks_event_reasons of nvidia-smi, by bit
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}

Line = dict[str, Any]


class Times(NamedTuple):
    """Times in microseconds."""

    median: float
    minimum: float
    p90: float

    @staticmethod
    def of(times: Sequence[float]) -> Times:
        ordered = sorted(times)
        p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        return Times(statistics.median(ordered), ordered[0], p90)


@dataclass
class BenchRow:
    """One measurement or check.

    microseconds: the median of a call; None where none was measured.
    beside: the name of the comparison, "BF16" or "copy", which takes beside_microseconds.
    predicted: microseconds by the cost model, in a report their middle and, as predicted_low and
        predicted_high, their ends; None where it does not know the device.
    kernel: that ran.  why: in words, of all but what was measured.
    more: whatever else helps: an algorithm, a traceback, a curve.
    """

    group: str
    name: str
    shape: tuple[int, ...] = ()
    status: str = MEASURED
    microseconds: float | None = None
    minimum: float | None = None
    p90: float | None = None
    beside: str = ""
    beside_microseconds: float | None = None
    predicted: Range | None = None
    kernel: str = ""
    why: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        if self.microseconds is None or not self.beside_microseconds:
            return None
        return self.microseconds / self.beside_microseconds

    def as_line(self) -> Line:
        found = asdict(self) | {"ratio": self.ratio}
        if (own := self.predicted) is not None:
            ends = {"predicted_low": own.low, "predicted_high": own.high}
            found |= {"predicted": own.middle} | ends
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = round(value, 3)
        return {name: value for name, value in found.items() if value not in (None, "", (), {})}


class Log:
    """Appends to a report. Several processes may, one after another."""

    def __init__(self, path: Path, start: float) -> None:
        self._path, self._start = path, start

    def write(self, kind: str, **parts: Any) -> None:
        line = {"kind": kind, "at": round(time.time() - self._start, 2), **parts}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Line]:
    """The lines of a report; a last one that was cut off is left out.

    Raises:
        ValueError: it is not a report.
    """
    lines: list[Line] = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            lines.append(line | {"kind": line["kind"]})
        except (ValueError, TypeError, KeyError):
            if number < len(texts):
                raise ValueError(
                    f"{path}, line {number}: not a line of a report: {text[:80]!r}"
                ) from None
    if not lines or lines[0]["kind"] != "machine":
        raise ValueError(f"{path} is not a report of `q2compile bench`: no line names the machine")
    if lines[0]["schema"] != SCHEMA:
        raise ValueError(
            f"{path} has schema {lines[0]['schema']}; this q2compile reads schema {SCHEMA}"
        )
    return lines


def text(line: Line) -> str:
    """A row in words; BENCH_UNITS of tools/arguments.py explains them."""
    shape = "x".join(map(str, line.get("shape", ())))
    head = f"  {line['name']:42} {shape:18}"
    status, micro, why = line["status"], line.get("microseconds"), line.get("why", "")
    if micro is None:
        return f"{head} {status if status != FAULT else 'FAULT'}{f': {why}' if why else ''}"
    parts = [f"{head} {micro:10.1f} us"]
    if "minimum" in line:
        parts[0] += f" (min {line['minimum']:.1f}, p90 {line['p90']:.1f})"
    if "ratio" in line:
        parts.append(_ratio(line["beside"], line["ratio"]))
    if "predicted" in line:
        own: float = line["predicted"]
        low, high = (line.get(f"predicted_{end}", own) for end in ("low", "high"))
        ends = Range(low, high)
        parts.append(f"predicted {ends.text('.1f')} us, {(ends / micro).text()}")
    if status == FAULT:
        parts.append(f"FAULT: {why}")
    return "; ".join(parts)


def _ratio(beside: str, ratio: float) -> str:
    if beside == "BF16":
        return time_words(ratio)
    return f"{ratio:.2f} copies" if beside == "copy" else f"{ratio:.2f} of {beside}'s time"


def faults(lines: Iterable[Line]) -> list[str]:
    """The faults in a report, those that ended a process first; [] if there are none."""
    lines = list(lines)
    found = [
        f"{line['group']}: {line['name']}{_by(line)}: {line['why']}"
        for line in lines
        if line["kind"] == "row" and line["status"] == FAULT
    ]
    running = ""
    for line in lines:
        if line["kind"] == "begun":
            running = f"{line['group']}: {line.get('name', 'the beginning')}"
        elif line["kind"] == "ended":
            if line["how"] != "finished":
                found.insert(0, f"{running}: the process {line['how']} while this ran")
            running = ""
    if not any(line["kind"] == "done" for line in lines):
        found.insert(0, f"the report is incomplete{running and f': it ends while {running} ran'}")
    return found


def doubts(lines: Iterable[Line]) -> list[str]:
    """Which times of a GPU are not to be relied on, and why."""
    found = []
    for line in lines:
        if line["kind"] == "machine" and "capability" not in line["device"]:
            return []
        if line["kind"] == "state" and line["when"] == "after":
            found += _slowed(line)
        elif line.get("p90", 0.0) > _SPREAD * line.get("microseconds", 0.0):
            times = line["p90"] / line["microseconds"]
            why = "something else was running, or clocks changed"
            found.append(f"{line['group']}: {line['name']}: p90 is {times:.1f} medians: {why}")
    return found


def _by(line: Line) -> str:
    shape = "x".join(map(str, line.get("shape", ())))
    return (f", {shape}" if shape else "") + (f", by {line['kernel']}" if "kernel" in line else "")


def _slowed(line: Line) -> list[str]:
    try:
        bits = int(str(line["state"]["clocks_throttle_reasons.active"]), 16)
    except (KeyError, TypeError, ValueError):
        return []
    words = [word for bit, word in _BAD_REASONS.items() if bits & bit]
    return [f"{line['group']}: the GPU was slowed down: {', '.join(words)}"] if words else []
