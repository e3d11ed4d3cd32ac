# SPDX-License-Identifier: Apache-2.0
"""Inductor's cache keys include a hash of this package's sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def source_hash() -> str:
    """`hash_of` the installed package, whose files are read once per process."""
    packages = ("q2compile", "q2compile.lowering", "q2compile.runtime_kernels")
    return hash_of(files(package) for package in packages)


def hash_of(folders: Iterable[Any]) -> str:
    """SHA-256 over every .py, .cu, .cuh, .cpp and .h file of the folders, in hexadecimal."""
    digest = hashlib.sha256()
    for folder in folders:
        _update(digest, folder)
    return digest.hexdigest()


def _update(digest: Any, folder: Any) -> None:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and not entry.name.startswith((".", "__")):
            _update(digest, entry)
        elif entry.name.endswith((".py", ".cu", ".cuh", ".cpp", ".h")):
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
