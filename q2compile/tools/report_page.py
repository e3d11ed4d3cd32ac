"""The command `q2compile report`: a dump folder, or one of telemetry, as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from q2compile.errors import ConfigError
from q2compile.report.page.document import report_page
from q2compile.report.read_dump import read_dump
from q2compile.telemetry.page.document import telemetry_page
from q2compile.telemetry.page.read import is_telemetry
from q2compile.tools.measure import measure


def main(argv: Sequence[str] | None = None) -> int:
    """``q2compile report DIR``: write the page of a folder and print where it is."""
    parser = argparse.ArgumentParser(
        prog="q2compile report", description="A dump folder, or one of telemetry, as one HTML page."
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="the folder given as options={'dump': DIR} or as telemetry's 'to'",
    )
    parser.add_argument("-o", "--output", help="the page to write; default DIR/report.html")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time each matmul that was taken on this machine, beside BF16",
    )
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    path = Path(arguments.output or folder / "report.html")
    if arguments.output and (path.is_dir() or not path.parent.is_dir()):
        why = "is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise ConfigError(f"--output: {path}: {why}; allowed: the page's name in a folder")
    if is_telemetry(folder):
        if arguments.measure:
            raise ConfigError("--measure times the matmuls of a dump; telemetry's folder has none")
        page = telemetry_page(folder)
    else:
        page = dump_page(folder, arguments.measure)
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


def dump_page(folder: str | Path, measured: bool = False) -> str:
    """A dump folder as one page: rows, then every graph's stages; with times of this machine if
    ``measured``.

    Raises ValueError when ``folder`` holds no report.json, or files that no dump has.
    """
    folder = Path(folder)
    rows, notes, graphs = read_dump(folder)
    if measured:
        measure(rows)
    return report_page(folder.resolve().name, rows, notes, graphs)
