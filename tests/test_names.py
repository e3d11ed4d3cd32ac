# SPDX-License-Identifier: Apache-2.0
"""Names are unique: a class name stands for one class, and no pass has the name of a function that
users call."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import q2compile
from q2compile.passes import PASSES
from tests.support.tracked import tracked

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("q2compile", "lowering", "runtime_kernels")


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in tracked(ROOT):
        file = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and file.startswith(PACKAGES):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_no_pass_has_a_public_name() -> None:
    assert {one.name for one in PASSES} & set(q2compile.__all__) == set()
