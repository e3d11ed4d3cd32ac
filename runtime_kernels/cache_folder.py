# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels, passed self-checks and measured choices are stored between processes."""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """$Q2COMPILE_CACHE_DIR, or q2compile under $XDG_CACHE_HOME or ~/.cache. For a user without a
    home (a container with `--user`), q2compile-UID in the folder for temporary files, where
    Inductor has its own. Deleting it costs seconds at the next start."""
    if folder := os.environ.get("Q2COMPILE_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "q2compile"
    try:
        return Path.home() / ".cache" / "q2compile"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"q2compile-{os.getuid()}"
