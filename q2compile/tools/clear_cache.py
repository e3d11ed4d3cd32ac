# SPDX-License-Identifier: Apache-2.0
"""`q2compile doctor --clear-cache`: delete what q2compile keeps on disk between processes."""

from __future__ import annotations

import re
from pathlib import Path

# Compiled kernels, results of self-checks, marks of those that never ended, and gemm-*.json, which
# 0.2 wrote: each named by a hash. The folder may be shared, by Q2COMPILE_CACHE_DIR, with files of
# others.
_OWN = re.compile(r".+-[0-9a-f]{24}\.(cubin|checked|[\w-]+\.checking|so)|gemm-[0-9a-f]{24}\.json")


def clear_cache(folder: Path) -> str:
    """Deletes q2compile's own files in a folder; says how many and how large they were. Deleted
    files are recreated when they are needed.

    Raises:
        OSError: a file can't be deleted.
    """
    files = [path for path in folder.glob("*") if _OWN.fullmatch(path.name)]
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    return f"{len(files)} files deleted in {folder}, {size / 1024:.0f} KiB"
