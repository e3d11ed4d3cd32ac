# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels and results of self-checks are stored between processes."""

import functools
import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

LOG = logging.getLogger("q2compile")
_HASH_SIZE = hashlib.sha256().digest_size


def cache_dir() -> Path:
    """$Q2COMPILE_CACHE_DIR, or q2compile under $XDG_CACHE_HOME or ~/.cache. Where that can't be
    written, or the user has no home (a container with `--user`), q2compile-UID in the folder for
    temporary files, where Inductor has its own. Deleting it costs seconds at the next start."""
    wanted = _wanted()
    if wanted is None or why_unwritable(wanted) is not None:
        return _temporary(Path(tempfile.gettempdir()))
    return wanted


def why_temporary() -> str | None:
    """Why the cache is in the folder for temporary files; None if it is where it should be."""
    wanted = _wanted()
    return "this user has no home folder" if wanted is None else why_unwritable(wanted)


def _wanted() -> Path | None:
    if folder := os.environ.get("Q2COMPILE_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "q2compile"
    try:
        return Path.home() / ".cache" / "q2compile"
    except RuntimeError:
        return None


@functools.cache
def why_unwritable(folder: Path) -> str | None:
    """Why a folder can't be written, which is said once; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        why = f"{folder} can't be written ({error.strerror or error})"
    LOG.warning(
        "q2compile: %s; compiled kernels and results of self-checks go to the temporary folder and "
        "are recreated after it is emptied. Q2COMPILE_CACHE_DIR can name another folder",
        why,
    )
    return why


@functools.cache
def _temporary(parent: Path) -> Path:
    """The cache in the temporary folder. Anyone may create a folder there, and the cache holds code
    that is loaded: a folder of another user, one that others may write, or a link is left for a new
    one, which later processes do not find."""
    folder = parent / f"q2compile-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_dir() and not folder.is_symlink():
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=parent))


def write_whole(path: Path, content: bytes) -> None:
    """Writes all or nothing, also with several processes. A hash follows the content, because a
    power cut, a quota or a network can still shorten a file that was written; loaders of ELF files
    ignore it.

    Raises:
        OSError: the folder can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:  # a full disk, Ctrl-C: leave nothing behind
            os.unlink(file.name)
            raise


def read_whole(path: Path) -> bytes | None:
    """The content that `write_whole` wrote; None if there is no such file, or another one."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    content, digest = found[:-_HASH_SIZE], found[-_HASH_SIZE:]
    return content if digest == hashlib.sha256(content).digest() else None
