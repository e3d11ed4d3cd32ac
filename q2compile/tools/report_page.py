"""The command `q2compile report`: a dump folder, or one of telemetry, as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from q2compile.report.page.document import report_page
from q2compile.report.read_dump import read_dump
from q2compile.telemetry.page.document import telemetry_page
from q2compile.telemetry.page.read import is_telemetry


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
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    page = telemetry_page(folder) if is_telemetry(folder) else dump_page(folder)
    path = Path(arguments.output or Path(arguments.folder) / "report.html")
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


def dump_page(folder: str | Path) -> str:
    """A dump folder as one page: rows, then every graph's stages.

    Raises ValueError when ``folder`` holds no report.json, or files that no dump has.
    """
    folder = Path(folder)
    return report_page(folder.name or str(folder), *read_dump(folder))
