# SPDX-License-Identifier: Apache-2.0
"""The rules of the tests: what they may patch, and which of them `make` runs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tracked import tracked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["quick", "test-internals"])
def test_lists_of_tests_in_the_makefile_are_of_tests(target: str) -> None:
    """A file that was moved or renamed would be an error of pytest's, in CI alone."""
    command = ["make", "--dry-run", target]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = [word for word in printed.split() if word.startswith("tests/")]
    assert len(named) > 10
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


def private_patches(path: Path) -> Iterator[str]:
    """Private names that a file has pytest or unittest replace: `setattr(module, "_name", ...)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("setattr", "delattr", "setitem", "object") and node.args:
            named = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            words = [*ast.unparse(node.args[0]).strip("'").split("."), *map(str, named)]
            if any(re.match(r"_[^_]", word) for word in words):
                yield ".".join(words)


# Private names of torch and of Triton that tests replace, where these have no public ones.
PRIVATE_PATCHES = {
    "driver._active",  # of triton.runtime
    "torch.__future__._swap_module_params_on_conversion",
    "torch._C._cuda_getCurrentRawStream",
    "torch._logging.trace_structured",
    "torch._scaled_grouped_mm",
}


def test_tests_patch_public_names() -> None:
    """A rename inside a module of ours then breaks no test."""
    files = [p for p in tracked(ROOT) if p.suffix == ".py" and p.is_relative_to(ROOT / "tests")]
    assert {name for p in files for name in private_patches(p)} == PRIVATE_PATCHES
