"""Rows and graphs as one plain HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from q2compile.errors import ConfigError, shown
from q2compile.report.row import COLUMNS, Row, cells

T = TypeVar("T")

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


def report_page(title: str, rows: list[Row], notes: list[str], graphs: Sequence[Path] = ()) -> str:
    """One page: the table, the notes, then every graph's stages, folded. graphs: their folders."""
    return _page(title, _table(rows) + _notes(notes) + "".join(map(_graph, graphs)))


def parsed(path: Path, parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of a file of a dump. Raises ValueError for one that was cut off, changed
    or written by something else."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        why = f"not as q2compile writes it ({type(error).__name__}: {shown(str(error))})"
    raise ConfigError(f'{path}: {why}; write the dump again, with options={{"dump": ...}}')


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
        parts.append(parsed(passes, _passes))
    for file in sorted(folder.iterdir()):
        if file.suffix in (".txt", ".py"):
            text = parsed(file, escape)
            parts.append(
                f"<details><summary>{escape(file.name)}</summary><pre>{text}</pre></details>\n"
            )
    return "".join(parts)


def _passes(text: str) -> str:
    records = json.loads(text)
    rows = "\n".join(
        f"<tr><td>{escape(r['graph'])}</td><td>{escape(r['name'])}</td><td>{r['matches']}</td>"
        f"<td>{1e3 * r['seconds']:.2f}</td><td>{escape(_changes(r))}</td></tr>"
        for r in records
    )
    head = "".join(f"<th>{h}</th>" for h in ("graph", "pass", "matches", "ms", "ops"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>\n"


def _changes(record: dict[str, Any]) -> str:
    return record["note"] or ", ".join(f"{op} {n:+d}" for op, n in record["ops"].items())
