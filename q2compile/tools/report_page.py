"""The command `q2compile report`: a dump folder, or one of telemetry, as one HTML page."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from q2compile.errors import ConfigError
from q2compile.report.html import parsed, report_page
from q2compile.report.row import Row, cells
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
    """A dump folder as one page: the table, then every graph's stages, folded.

    Raises ValueError when ``folder`` holds no report.json, or files that no dump has.
    """
    folder = Path(folder)
    source = folder / "report.json"
    if not source.is_file():
        inside = sorted(p.parent.name for p in folder.glob("*/report.json"))
        hint = f"; it holds dumps in {', '.join(inside)}: name one of them" if inside else ""
        raise ConfigError(
            f"{folder}: no report.json here, so this is no dump folder, and no records of "
            f'telemetry{hint}. Write one with options={{"dump": "graphs/"}}, or '
            'options={"telemetry": {"to": "telemetry/"}}'
        )
    rows = parsed(source, _rows)
    notes = parsed(folder / "report.txt", _notes)
    graphs = [path for path in folder.iterdir() if re.fullmatch(r"graph_\d+", path.name)]
    graphs.sort(key=lambda path: int(path.name.removeprefix("graph_")))
    taken = sum(r.taken for r in rows)
    title = f"{folder.name}: {taken} of {len(rows)} matmuls taken, {len(graphs)} graph(s)"
    return report_page(title, rows, notes, graphs)


def _rows(text: str) -> list[Row]:
    rows = [Row(**row) for row in json.loads(text)]
    for row in rows:
        "".join(cells(row).values())  # raises for values that no row has
    return rows


def _notes(text: str) -> list[str]:
    return [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: ")]
