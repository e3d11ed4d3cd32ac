# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the API reference, from docstrings, by pdoc.

    python -m tests.support.api_reference [FOLDER]

Docstrings are written to be read as plain text, with fields in columns:

    recipe   a recipe's name, or a mapping
             that changes one

Markdown would run these into one paragraph, so they are made into lists first.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdoc

import q2compile
from q2compile import telemetry

_FIELD = re.compile(r"(\w[\w, ]*?)\s{2,}(\S.*)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the API reference as HTML.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/docs"))
    folder = parser.parse_args().folder
    write(folder)
    print(f"{folder / 'index.html'} written")


def write(folder: Path) -> None:
    """The pages of q2compile and of q2compile.telemetry, and an index."""
    for module in (q2compile, telemetry):
        for name in module.__all__:
            vars(module)[name] = getattr(module, name)  # pdoc does not ask for names loaded late
            for documented in _with_members(getattr(module, name)):
                documented.__doc__ = listed(inspect.cleandoc(documented.__doc__))
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    pdoc.pdoc("q2compile", output_directory=folder)


def _with_members(public: Any) -> Iterator[Any]:
    """A function; or a class and its own public functions and properties: those with a text."""
    if not inspect.isclass(public) and not inspect.isfunction(public):
        return
    own = vars(public).items() if inspect.isclass(public) else ()
    inner = (getattr(member, "__func__", member) for name, member in own if name[0] != "_")
    for documented in (public, *inner):
        text = getattr(documented, "__doc__", None)
        if isinstance(text, str) and (inspect.isroutine(documented) or documented is public):
            yield documented


def listed(text: str) -> str:
    """``text`` with its fields in columns as a Markdown list."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        field = _FIELD.fullmatch(line)
        if field:
            lines += [] if inside else [""]
            names = ", ".join(f"`{name.strip()}`" for name in field[1].split(","))
            lines.append(f"- {names}: {field[2]}")
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            lines += [""] * (inside and bool(line))
            lines.append(line)
        inside = bool(field) or inside and line.startswith("  ")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
