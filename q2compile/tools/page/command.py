# SPDX-License-Identifier: Apache-2.0
"""The command `q2compile report`: what a run left, as one HTML page. A dump has rows, notes, graphs
and facts of the run; beside it may be telemetry and a comparison."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from q2compile.errors import ConfigError, shown
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row
from q2compile.telemetry.read import is_telemetry, other_runs, read_folder
from q2compile.tools.given import refuse_no_page
from q2compile.tools.measure import measure
from q2compile.tools.page.document import headline, report_page

_COMPARISON = "compare.json"  # as q2compile compare names it


def run(arguments: Namespace) -> int:
    """``q2compile report RUN``: write the page of a folder and print where it is."""
    folder = Path(arguments.folder)
    path = Path(arguments.output or folder / "report.html")
    if arguments.output:
        refuse_no_page(path)
    path.write_text(run_page(folder, arguments.measure), encoding="utf-8")
    print(path)
    return 0


def run_page(folder: str | Path, measured: bool = False) -> str:
    """The page of a run's folder: of its dump, its telemetry and its comparison, each in the folder
    or in one inside it; those that are there. ``measured``: with times of this machine.

    Raises ValueError where none is there, where two folders hold the same part, and for files
    that q2compile did not write.
    """
    folder = Path(folder)
    records, comparison = _home(folder, is_telemetry), _home(folder, _has_comparison)
    dump = _home(folder, _has_dump)
    telemetry = None if records is None else read_folder(records)
    compared = None if comparison is None else read_comparison(comparison / _COMPARISON)
    name = folder.resolve().name
    if measured and dump is None and (records is not None or compared is not None):
        raise ConfigError(f"--measure times the matmuls of a dump, and {folder} holds no dump")
    if dump is None and records is not None:
        return report_page(name, [], _others(records), {}, telemetry=telemetry, comparison=compared)
    if dump is None and compared is not None:
        return report_page(name, rows_of_comparison(compared), [], {}, comparison=compared)
    rows, notes, graphs = read_dump(dump or folder)
    notes += [] if records is None else _others(records)
    if measured:
        measure(rows)
    known = rows, notes, graphs
    run = read_run(dump or folder)
    return report_page(name, *known, telemetry=telemetry, comparison=compared, run=run)


def _home(folder: Path, holds: Callable[[Path], bool]) -> Path | None:
    """The folder of a part of a run: ``folder``, or the only one inside it that holds such a part;
    for a run of more ranks, rank 0's dump. Raises ValueError where several hold one."""
    if not folder.is_dir():
        return None
    near = [folder] if holds(folder) else [p for p in sorted(folder.iterdir()) if p.is_dir()]
    homes = [home for p in near for home in (p, p / "rank0") if home.is_dir() and holds(home)]
    if len(homes) > 1:
        names = ", ".join(str(home.relative_to(folder)) for home in homes)
        raise ConfigError(f"{folder}: {names} hold the same part of a run; keep one of them here")
    return homes[0] if homes else None


def _others(records: Path) -> list[str]:
    """A note that names what else was recorded, if anything was."""
    others = ", ".join(str(records / name) for name in other_runs(records))
    what = "other models or processes recorded into this folder, too; for a page of their records"
    return [f"{what} name one of {others}"] if others else []


def _has_dump(folder: Path) -> bool:
    return (folder / "report.json").is_file()


def _has_comparison(folder: Path) -> bool:
    return (folder / _COMPARISON).is_file()


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
