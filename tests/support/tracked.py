# SPDX-License-Identifier: Apache-2.0
"""The files of this project, without other files in the same folders."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path


def tracked(root: Path) -> list[Path]:
    """Files that git tracks; in an unpacked sdist, which has no .git, the files of the sdist."""
    if (root / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
        names = done.stdout.decode().split("\0")
    else:
        names = (root / "q2compile.egg-info" / "SOURCES.txt").read_text("utf-8").splitlines()
        names = [name for name in names if not name.startswith("q2compile.egg-info/")]
    return sorted(root / name for name in names if name and (root / name).is_file())


@cache
def parsed(path: Path) -> ast.Module:
    """A Python file, which several tests read and none changes."""
    return ast.parse(path.read_text(encoding="utf-8"))
