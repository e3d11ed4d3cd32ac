# SPDX-License-Identifier: Apache-2.0
"""The records of a folder, for the report's page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from q2compile.errors import ConfigError, shown
from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics.statistics import FIELDS
from q2compile.runtime_kernels.ops.gaussian import gaussian_error

STATISTICS = (*FIELDS, "changed")
MOST_STEPS = 240  # of a curve: a page has some 100 pixels for it in the overview
_NAMES = ("module", "gemm", "operand", "format")
_FILE = re.compile(r"rank(\d+)\.jsonl")


def is_telemetry(folder: Path) -> bool:
    """Whether a folder has records of a rank."""
    return folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir())


def read_folder(folder: Path) -> dict[str, Any]:
    """The data of the page:

        name       of the folder
        steps      those that were recorded, at most MOST_STEPS of them, spread evenly
        ranks      the ranks that have records
        statistics  their names
        operands   [{"rank", "module", "gemm", "operand", "format", "gaussian", "last", "curves":
                   {name: a number or null for each step}}]. "gaussian" is the relative error of
                   the scheme on N(0, 1). "last" is the last record that has an error, {"step",
                   "relative_error"}, or null: records of cached weights have none, nor have those
                   after an Inf
        nonfinite  [{"rank", "step", "module", "gemm", "operand"}]: each rank's first
        last       the last step that was recorded, null without one

    A run that went on in the files of an earlier one replaces what that recorded of its first step
    and later. A last line that was cut off is left out.

    Raises ValueError for a file with anything else in it.
    """
    records: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    nonfinite: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(path.name):
            rank = int(match.group(1))
            for line in _of_last_run(lines_of(path)):
                if line.get("event") == "nonfinite":
                    nonfinite.append({"rank": rank, **line})
                elif "event" not in line:
                    key = (rank, *(line[k] for k in _NAMES))
                    records.setdefault(key, {})[line["step"]] = line
    recorded = sorted({step for by_step in records.values() for step in by_step})
    steps = _spread(recorded)
    return {
        "name": folder.name or str(folder),
        "last": recorded[-1] if recorded else None,
        "steps": steps,
        "ranks": sorted({key[0] for key in records}),
        "statistics": list(STATISTICS),
        "operands": [_operand(key, by_step, steps) for key, by_step in records.items()],
        "nonfinite": nonfinite,
    }


def largest_inputs(folder: Path) -> dict[str, float]:
    """Module -> the largest amax of x in fprop that any rank recorded at any step."""
    found: dict[str, float] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for row in lines_of(file):
            is_x = (row.get("gemm"), row.get("operand")) == ("fprop", "x")
            if is_x and row.get("amax") is not None:
                found[row["module"]] = max(found.get(row["module"], 0.0), row["amax"])
    return found


def other_runs(folder: Path) -> list[str]:
    """The folders inside this one that have the records of other models or processes."""
    if not folder.is_dir():
        return []
    inside = [path for path in folder.glob("*/") if is_telemetry(path)]
    inside += [path for path in folder.glob("process*/*/") if is_telemetry(path)]
    return sorted(str(path.relative_to(folder)) for path in inside)


def _of_last_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    starts = False
    for line in lines:
        if line.get("event") == "start":
            starts = True
        elif "step" in line:
            if starts:
                kept = [one for one in kept if one["step"] < line["step"]]
            kept.append(line)
            starts = False
    return kept


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a rank's file, without a last one that was cut off. Raises ValueError for a file
    with anything else in it."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; telemetry writes a file of records") from None
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if "event" not in line:
                _ = int(line["step"]), [float(line[s] or 0) for s in STATISTICS]
                _ = gaussian_error(Operand.parse(line["format"]).scheme)
            if line.get("event", "nonfinite") == "nonfinite":
                _ = [line[k] + "" for k in ("module", "gemm", "operand")], line["step"] + 0
            found.append(line)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if number == len(texts):  # the process was ended while it wrote
                break
            raise ConfigError(
                f"{path}, line {number}: not as q2compile writes it "
                f"({type(error).__name__}: {shown(str(error))})"
            ) from None
    return found


def _spread(steps: list[int]) -> list[int]:
    count = min(len(steps), MOST_STEPS)
    return [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]


def _operand(
    key: tuple[Any, ...], by_step: dict[int, dict[str, Any]], steps: Iterable[int]
) -> dict[str, Any]:
    rank, module, gemm, operand, quantized = key
    curves = {
        name: [_rounded(by_step.get(step, {}).get(name)) for step in steps] for name in STATISTICS
    }
    known = [step for step, line in by_step.items() if line["relative_error"] is not None]
    last = max(known, default=None)
    return {
        "rank": rank,
        "module": module,
        "gemm": gemm,
        "operand": operand,
        "format": quantized,
        "gaussian": gaussian_error(Operand.parse(quantized).scheme),
        "last": None
        if last is None
        else {"step": last, "relative_error": _rounded(by_step[last]["relative_error"])},
        "curves": curves,
    }


def _rounded(number: Any) -> float | None:
    """Round to 4 digits, as exact as a sample is; a cosine's distance from 1 to 5."""
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.5g}" if 0.5 < abs(number) <= 1 else f"{number:.4g}")
