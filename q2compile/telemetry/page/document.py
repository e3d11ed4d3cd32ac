"""The page: its frame, styles, script and data in one file."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from q2compile.telemetry.page.read import read_folder


def telemetry_page(folder: Path) -> str:
    """One HTML file of a telemetry folder. Raises ValueError for files that q2compile did not
    write."""
    data = read_folder(folder)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    frame = _static("page.html")
    for name, value in {
        "title": escape(f"{data['name']}: telemetry"),
        "headline": escape(headline(data)),
        "style": _static("page.css"),
        "script": _static("page.js"),
        "data": text,  # last: nothing is looked for in what it holds
    }.items():
        frame = frame.replace(f"{{{{{name}}}}}", value)
    return frame


def headline(data: dict[str, Any]) -> str:
    """What was recorded, in a sentence."""
    steps, modules = data["steps"], {row["module"] for row in data["operands"]}
    if not steps:
        return "Nothing is recorded here yet."
    ranks = len(data["ranks"])
    of_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    plural = "" if len(modules) == 1 else "s"
    return f"{len(modules)} module{plural}, {which}{of_ranks}."


def _static(name: str) -> str:
    return files("q2compile.telemetry.page").joinpath(name).read_text(encoding="utf-8")
