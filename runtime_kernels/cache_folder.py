# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels, passed self-checks and measured choices are stored between processes."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$Q2COMPILE_CACHE_DIR, or q2compile under $XDG_CACHE_HOME or ~/.cache. Deleting it costs
    seconds at the next start."""
    if folder := os.environ.get("Q2COMPILE_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "q2compile"
