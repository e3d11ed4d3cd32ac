"""The report and the dump folder as one plain HTML page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from q2compile.errors import ConfigError
from q2compile.report import COLUMNS, Report, Row, cells

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1c1e21; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dce2; text-align: left; vertical-align:
top; } td { font-family: ui-monospace, monospace; font-size: 12px; }
th { position: sticky; top: 0; background: #f3f5f8; }
tr.no td { color: #7a4a00; background: #fff8ec; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 12px; }
summary { cursor: pointer; font-family: ui-monospace, monospace; }
"""


def main(argv: Sequence[str] | None = None) -> int:
    """``q2compile report DIR``: write a dump folder's page and print where it is."""
    parser = argparse.ArgumentParser(
        prog="q2compile report", description="A dump folder as one HTML page."
    )
    parser.add_argument("folder", metavar="DIR", help="the folder given as options={'dump': DIR}")
    parser.add_argument("-o", "--output", help="the page to write; default DIR/report.html")
    arguments = parser.parse_args(argv)
    page = dump_page(arguments.folder)
    path = Path(arguments.output or Path(arguments.folder) / "report.html")
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


def report_page(report: Report) -> str:
    """The report alone."""
    return _page(report.summary(), _table(report.rows) + _notes(report.notes))


def dump_page(folder: str | Path) -> str:
    """A dump folder as one page: the table, then every graph's stages, folded.

    Raises ValueError when ``folder`` holds no report.json.
    """
    folder = Path(folder)
    source = folder / "report.json"
    if not source.is_file():
        inside = sorted(p.parent.name for p in folder.glob("*/report.json"))
        hint = f"; it holds dumps in {', '.join(inside)}: name one of them" if inside else ""
        raise ConfigError(
            f"{folder}: no report.json here, so this is no dump folder{hint}. Write one with "
            'options={"dump": "graphs/"}'
        )
    rows = [Row(**row) for row in json.loads(source.read_text(encoding="utf-8"))]
    text = (folder / "report.txt").read_text(encoding="utf-8")
    notes = [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: ")]
    graphs = sorted(folder.glob("graph_*"), key=lambda p: int(p.name.removeprefix("graph_")))
    taken = sum(r.taken for r in rows)
    title = f"{folder.name}: {taken} of {len(rows)} matmuls taken, {len(graphs)} graph(s)"
    return _page(title, _table(rows) + _notes(notes) + "".join(map(_graph, graphs)))


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th>{c}</th>" for c in COLUMNS)
    body = "\n".join(
        f'<tr class="{cells(row)["taken"]}">'
        + "".join(f"<td>{escape(cells(row)[c])}</td>" for c in COLUMNS)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _notes(notes: list[str]) -> str:
    items = "".join(f"<li>{escape(n)}</li>" for n in notes)
    return f"<ul>{items}</ul>\n" if items else ""


def _graph(folder: Path) -> str:
    parts = [f"<h2>{escape(folder.name)}</h2>\n"]
    passes = folder / "passes.json"
    if passes.is_file():
        parts.append(_passes(json.loads(passes.read_text(encoding="utf-8"))))
    for file in sorted(folder.iterdir()):
        if file.suffix in (".txt", ".py"):
            text = escape(file.read_text(encoding="utf-8"))
            parts.append(
                f"<details><summary>{escape(file.name)}</summary><pre>{text}</pre></details>\n"
            )
    return "".join(parts)


def _passes(records: list[dict[str, Any]]) -> str:
    rows = "\n".join(
        f"<tr><td>{escape(r['graph'])}</td><td>{escape(r['name'])}</td><td>{r['matches']}</td>"
        f"<td>{1e3 * r['seconds']:.2f}</td><td>{escape(_changes(r))}</td></tr>"
        for r in records
    )
    head = "".join(f"<th>{h}</th>" for h in ("graph", "pass", "matches", "ms", "ops"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"


def _changes(record: dict[str, Any]) -> str:
    return record["note"] or ", ".join(f"{op} {n:+d}" for op, n in record["ops"].items())
