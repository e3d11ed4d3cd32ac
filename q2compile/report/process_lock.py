# SPDX-License-Identifier: Apache-2.0
"""A file that one process at a time has locked, for as long as it lives."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def locked(path: Path) -> TextIO | None:
    """The open file, created if need be; None if another process has locked it.

    A lock of the POSIX kind: a forked process does not inherit it, a killed one loses it, and so
    does one that opens and closes the file again.
    """
    file = path.open("a", encoding="utf-8")
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:  # a file system without locks: not known
        pass
    return file
