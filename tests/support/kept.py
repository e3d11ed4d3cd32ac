# SPDX-License-Identifier: Apache-2.0
"""Files that tests compile, kept in build/kept for the next run: kernels for a CPU, and PTX. A
file's name is a hash of all that it is made of, so a changed source never gets an old file."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "build" / "kept"
_DAYS = 30  # after which a file that no test asks for is deleted


def kept(suffix: str, made_of: tuple[object, ...], make: Callable[[Path], None]) -> Path:
    """A file that is made when it is asked for the first time.

    suffix: of its name.
    made_of: sources, options and the compiler's version.
    make: writes the file to the path that it is given.
    """
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    path = _folder() / f"{key}{suffix}"
    try:
        os.utime(path)
    except FileNotFoundError:
        unfinished = path.with_name(f"{os.getpid()}-{path.name}")
        make(unfinished)
        unfinished.replace(path)  # other processes see all of it or nothing
    return path


@functools.cache
def _folder() -> Path:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - _DAYS * 24 * 60 * 60
    for path in _FOLDER.iterdir():
        with suppress(FileNotFoundError):  # another process has deleted it
            if path.stat().st_mtime < oldest:
                path.unlink()
    return _FOLDER
