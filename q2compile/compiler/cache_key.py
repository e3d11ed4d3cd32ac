# SPDX-License-Identifier: Apache-2.0
"""Inductor's cache keys include a hash of this package's sources."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def source_hash() -> str:
    """SHA-256 over every .py, .cu and .cpp file of the installed package, read once a process."""
    digest = hashlib.sha256()
    for package in ("q2compile", "q2compile.lowering", "q2compile.runtime_kernels"):
        _update(digest, files(package))
    return digest.hexdigest()


def _update(digest: Any, folder: Any) -> None:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and not entry.name.startswith((".", "__")):
            _update(digest, entry)
        elif entry.name.endswith((".py", ".cu", ".cuh", ".cpp", ".h")):
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
