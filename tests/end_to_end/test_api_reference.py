# SPDX-License-Identifier: Apache-2.0
"""`make docs` documents every public name, and so does examples/guides/api.md: by its signature and
the first paragraph of its docstring."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import q2compile
from q2compile import telemetry

pytest.importorskip("pdoc")
from tests.support.api_reference import listed

ROOT = Path(__file__).resolve().parents[2]
TYPES = (q2compile.Options, q2compile.RecipeChange, q2compile.TelemetryMapping)


def test_every_public_name_is_in_the_reference(tmp_path: Path) -> None:
    """In a separate process, because building the reference changes docstrings."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.api_reference", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for module, page in ((q2compile, "q2compile.html"), (telemetry, "q2compile/telemetry.html")):
        text = (tmp_path / page).read_text(encoding="utf-8")
        anchors = set(re.findall(r'id="([\w.]+)"', text))
        assert {*module.__all__} - anchors <= {"telemetry", "__version__"}
    options = (tmp_path / "q2compile.html").read_text(encoding="utf-8")
    listed_options = set(re.findall(r"<li><code><a href=\S+>(\w+)</a></code>: ", options))
    assert {f.name for f in fields(q2compile.Config)} <= listed_options
    assert "telemetry.html" in options


def test_fields_in_columns_become_a_list() -> None:
    text = "What it is.\n\nname   the first\n       of two\na, b   both\n\n    code  stays"
    expected = "What it is.\n\n\n- `name`: the first\n  of two\n- `a`, `b`: both\n\n    code  stays"
    assert listed(text) == expected


def public() -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(q2compile, name)) for name in q2compile.__all__)
    yield from ((f"telemetry.{name}", getattr(telemetry, name)) for name in telemetry.__all__)


def signature(name: str, called: Any) -> str:
    """As the page writes it: defaults and the result, without the types of the arguments."""
    found = inspect.signature(called)
    bare = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    returned = "" if inspect.isclass(called) else f" -> {found.return_annotation}".replace("'", "")
    return f"`{name}{found.replace(parameters=bare, return_annotation=found.empty)}{returned}`"


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = " ".join((ROOT / "examples" / "guides" / "api.md").read_text(encoding="utf-8").split())
    missing = []
    for name, one in public():
        first = " ".join(inspect.cleandoc(one.__doc__ or "").split("\n\n")[0].split())
        first = first.replace("``", "`")
        if inspect.isroutine(one) or name == "Config":
            wanted = f"{signature(name, one)} {first}"
        elif inspect.isclass(one) and one.__module__.startswith("q2compile") and one not in TYPES:
            kind = rf"\| `{name}` \| `(\w+(?:\.\w+)?)` \| {re.escape(first)} \|"
            (base,) = re.findall(kind, page) or [""]
            wanted = "" if base else f"| `{name}` | ... | {first} |"
            if issubclass(one, Exception):
                assert base in {parent.__name__ for parent in one.__mro__[1:]}, name
        else:
            wanted = f"`{name}`" if name != "telemetry" else f"### {name}"
        missing += [wanted] * (wanted not in page)
    assert missing == []
