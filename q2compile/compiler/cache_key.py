# SPDX-License-Identifier: Apache-2.0
"""Inductor's cache keys include a hash of this package's sources."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from q2compile.runtime_kernels.versions import hash_of


@cache
def source_hash() -> str:
    """`hash_of` the installed package, whose files are read once per process."""
    packages = ("q2compile", "q2compile.lowering", "q2compile.runtime_kernels")
    return hash_of(*(Path(str(files(package))) for package in packages))
