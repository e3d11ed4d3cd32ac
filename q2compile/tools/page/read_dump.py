# SPDX-License-Identifier: Apache-2.0
"""A run's folder read back: a dump's rows, notes and graphs, what the run was, a comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from q2compile.errors import ConfigError, shown
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row
from q2compile.tools.page.headline import headline

T = TypeVar("T")


def read_dump(folder: Path) -> tuple[list[dict[str, Any]], list[str], dict[int, dict[str, str]]]:
    """(rows as `Row.to_json` gives them, notes, graph's number -> name of a file -> its text).

    Keys that report.json did not have when it was written have their defaults. Raises ValueError
    when ``folder`` holds no report.json, or files that no dump has.
    """
    source = folder / "report.json"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(
            f'{folder}: {what}; name the folder given as options={{"dump": ...}}, or as '
            'telemetry\'s "to"'
        )
    if not source.is_file():
        inside = sorted(p.parent.name for p in folder.glob("*/report.json"))
        hint = f"; it holds dumps in {', '.join(inside)}: name one of them" if inside else ""
        if (folder.resolve().parent / source.name).is_file():
            hint = f"; it is inside a dump: name {folder.resolve().parent}"
        raise ConfigError(
            f"{folder}: this folder holds neither a dump (no report.json) nor records of "
            f'telemetry{hint}. Write one with options={{"dump": "graphs/"}}, or '
            'options={"telemetry": {"to": "telemetry/"}}'
        )
    rows = _parsed(source, _rows)
    notes = _parsed(folder / "report.txt", _notes)
    found = (re.fullmatch(r"graph_(\d+)", p.name) for p in folder.iterdir() if p.is_dir())
    return rows, notes, {int(match[1]): _graph(folder / match[0]) for match in found if match}


def read_run(folder: Path) -> dict[str, Any]:
    """A dump's run.json, as `RunFacts.to_json` gives it; {} where a dump was written without."""
    path = folder / "run.json"
    return _parsed(path, json.loads) if path.is_file() else {}


def read_comparison(path: Path) -> dict[str, Any]:
    """A compare.json, as `Comparison.to_json` gives it."""
    return _parsed(path, _checked_comparison, "measure again, with q2compile compare")


def rows_of_comparison(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a page that shows a comparison without a dump: its modules, and what was left."""
    name = comparison["recipe"]
    gemms = dict(zip(GEMMS, RECIPES[name].texts(), strict=True)) if name in RECIPES else {}
    rows = [Row(module, (), why=why) for module, why in comparison.get("left", {}).items()]
    for module in comparison["modules"]:
        sizes = str(module.get("shape", "")).split("×")
        row = Row(module["module"], tuple(int(n) if n.isdigit() else n for n in sizes))
        row.taken, row.recipe, row.flops = True, name, module["flops"]
        row.predicted = {
            device: {"microseconds": own, "bf16_microseconds": module["bf16_microseconds"][device]}
            | module.get("ends", {}).get(device, {})
            for device, own in module.get("microseconds", {}).items()
        }
        for gemm, text in gemms.items():
            setattr(row, gemm, text)
        rows.append(row)
    return [row.to_json() for row in rows]


def _checked_comparison(text: str) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads(text)
    rows_of_comparison(comparison)
    return comparison


_AGAIN = 'write the dump again, with options={"dump": ...}'


def _parsed(path: Path, parse: Callable[[str], T], again: str = _AGAIN) -> T:
    """A file of a run, parsed by ``parse``. Raises ValueError for one that was cut off, changed or
    written by something else."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        why = f"not as q2compile writes it ({type(error).__name__}: {shown(str(error))})"
    raise ConfigError(f"{path}: {why}; {again}")


def _rows(text: str) -> list[dict[str, Any]]:
    rows = [Row(**row).to_json() for row in json.loads(text)]
    headline(rows)
    return rows


def _notes(text: str) -> list[str]:
    return [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: ")]


def _graph(folder: Path) -> dict[str, str]:
    files = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in (".txt", ".py", ".json") and file.is_file():
            files[file.name] = _parsed(file, str)
            if file.suffix == ".json":
                _parsed(file, json.loads)
    return files
