# SPDX-License-Identifier: Apache-2.0
"""`make docs` documents every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import q2compile
from q2compile import telemetry

pytest.importorskip("pdoc")
from tests.support.api_reference import listed

ROOT = Path(__file__).resolve().parents[2]


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
