# SPDX-License-Identifier: Apache-2.0
"""The command `q2compile report`: what a run left, as one HTML page."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from q2compile.errors import ConfigError
from q2compile.telemetry.read import is_telemetry, other_runs, read_folder
from q2compile.tools.given import refuse_no_page
from q2compile.tools.measure import measure
from q2compile.tools.page.document import report_page
from q2compile.tools.page.read_dump import (
    read_comparison,
    read_dump,
    read_run,
    rows_of_comparison,
)

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
