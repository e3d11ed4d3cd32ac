"""The page: its styles, script and data in the frame of the report's."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from q2compile.report.page.assemble import assemble, static
from q2compile.telemetry.page.read import read_folder


def telemetry_page(folder: Path) -> str:
    """One HTML file of a telemetry folder. Raises ValueError for files that q2compile did not
    write."""
    data = read_folder(folder)
    name, said = data["name"], headline(data)
    body = _static("telemetry.html").replace("{{name}}", escape(name))
    body = body.replace("{{headline}}", escape(said))
    style, script = _static("telemetry.css"), _static("telemetry.js")
    return assemble(f"{name}: {said}", [style], [script], body, data)


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
    return static(name, "q2compile.telemetry.page")
