# SPDX-License-Identifier: Apache-2.0
"""Results of self-checks on a GPU like this one, stored on disk beside the cubins. Each check has a
file, named by a hash of the check, the device, the versions and the sources.

    OP-HASH.checked         whether the kernel passed, or why it is rejected
    OP-HASH.PID.checking    a process is at the check now

So a kernel is checked once on a machine, not in each process. The second file is written before the
kernel runs. If the kernel crashes the process or the machine, the file stays, and the next process
rejects the kernel instead of running it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cuda.versions import versions
from q2compile.runtime_kernels.kernel_states import rejected

Check = tuple  # an op, the kernel's name, the device, and with what
_KERNELS = Path(__file__).parents[1]  # runtime_kernels
_SUFFIXES = (".py", ".cu", ".cuh")
# After this many seconds a check has ended, or its process was killed for exceeding the time limit.
_LONGEST = 300.0
UNENDED = "its self-check did not end in an earlier process"


class Request(NamedTuple):
    """A self-check.

    module: has the function `disagreement`, which is called with `arguments` and returns None, or
        how the kernel's results differ from the reference's.
    sources: folders of the kernel's sources, besides runtime_kernels.
    """

    check: Check
    module: str
    arguments: tuple
    sources: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For log lines."""
        op, name, device, *what = self.check
        words = [str(part) for part in what if part is not None and str(part) != op]
        return f"kernel {name!r} of q2::{op} on {device} ({', '.join(words)})"


class Result(NamedTuple):
    """reason: None where the kernel passed, else why it is rejected."""

    reason: str | None
    seconds: float = 0.0


def stored(request: Request) -> Result | None:
    """The result of an earlier process, if there is one."""
    try:
        found = json.loads(_path(request).read_text(encoding="utf-8"))
        reason, seconds = found["reason"], float(found["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Result(reason and rejected(f"{reason} ({found.get('date')})"), seconds)


def store(request: Request, result: Result) -> None:
    """Stores a result. If the folder can't be written, each process runs the check."""
    reason = result.reason and result.reason.removeprefix(rejected(""))
    _write(
        _path(request),
        what=request.label,
        reason=reason,
        seconds=round(result.seconds, 3),
        date=datetime.date.today().isoformat(),
        versions=versions(),
    )


def mark(request: Request) -> None:
    """Marks that this process runs the check."""
    pid = os.getpid()
    _write(_marker(request, pid), host=socket.gethostname(), started=_started(pid))


def unmark(request: Request, pid: int | None = None) -> None:
    """Removes that mark, by default of this process."""
    with suppress(OSError):
        _marker(request, os.getpid() if pid is None else pid).unlink(missing_ok=True)


def take_unended(request: Request) -> bool:
    """Whether a process ended while it ran the check; its mark is removed."""
    path = _path(request)
    with suppress(OSError):
        gone = [m for m in path.parent.glob(f"{path.stem}.*.checking") if not _is_alive(m)]
        for marker in gone:
            marker.unlink(missing_ok=True)
        return bool(gone)
    return False


def named(device: torch.device) -> tuple[str, int, int]:
    """The properties of a device that kernels depend on."""
    if device.type != "cuda":
        return device.type, 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.major, properties.minor


def forget_sources() -> None:
    """As in a new process: the sources of the kernels are read again."""
    _hash.cache_clear()


def _is_alive(marker: Path) -> bool:
    """Whether the process of a mark is running. Of one on another machine, which shares the folder,
    only the age of the mark is known."""
    try:
        if time.time() - marker.stat().st_mtime > _LONGEST:
            return False
        found = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if found.get("host") != socket.gethostname():
        return True
    pid = int(marker.name.split(".")[-2])
    return not found.get("started") or found["started"] == _started(pid)


def _started(pid: int) -> str:
    """When a process of this machine began, in ticks; "" if there is none. Process ids are
    reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _path(request: Request) -> Path:
    op, name, device, *what = request.check
    key = hashlib.sha256()
    sources = _hash(tuple(map(Path, request.sources)))
    for part in (op, name, *what, *named(device), *versions(), sources):
        key.update(f"{part}\0".encode())
    return cache_dir() / f"{op}-{key.hexdigest()[:24]}.checked"


def _marker(request: Request, pid: int) -> Path:
    return _path(request).with_suffix(f".{pid}.checking")


def _write(path: Path, **parts: Any) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(parts) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@functools.cache
def _hash(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for folder in (_KERNELS, *sources):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
