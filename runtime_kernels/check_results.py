# SPDX-License-Identifier: Apache-2.0
"""Results of self-checks on a GPU like this one, stored on disk beside the cubins. Each check has a
file, named by a hash of the check, the device, the versions and the sources.

    OP-HASH.checked             whether the kernel passed, or why it is rejected; or a strike
    OP-HASH.PID-TOKEN.checking  locked by a process that is at the check now

So a kernel is checked once on a machine, not in each process. The second file is written before the
kernel runs. If nobody locks it, its process ended without an answer to the check. A kernel that
crashed the machine looks like a job that was killed in the meantime, so this is a strike: the check
runs again, and the second strike within a day rejects the kernel.

Wrong numbers reject a kernel for as long as nothing changes. Any other rejection may have come from
the moment: the kernel is checked again after a day.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.kernel_states import KNOWN, Result, rejected
from q2compile.runtime_kernels.versions import hash_of, versions

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger("q2compile")
Check = tuple  # an op, the kernel's name, the device, and with what
_DAY = 24 * 3600.0  # after which a rejection that may have come from the moment is not believed
_MARKS: dict[Check, tuple[Path, IO[str]]] = {}  # of this process


class Request(NamedTuple):
    """A self-check.

    module: has functions that are called with `arguments`. `disagreement` returns None, or how the
        kernel's results differ from the reference's. `compiling`, if there is one, returns threads
        that compile what that launches.
    sources: folders of the kernel's sources, besides runtime_kernels.
    here: it takes milliseconds and does no harm, so it runs at once in the process that asks, each
        time that a process does.
    """

    check: Check
    module: str
    arguments: tuple
    sources: tuple[str, ...] = ()
    here: bool = False

    @property
    def label(self) -> str:
        """The subject of the check, for log lines."""
        op, name, device, *what = self.check
        words = [str(part) for part in what if part is not None and str(part) != op]
        return f"kernel {name!r} of q2::{op} on {device} ({', '.join(words)})"


def found(request: Request, unended: str) -> Result | None:
    """The result of an earlier process, if there is one. If a process has ended while it ran the
    check, that is a strike. unended: what is said of it."""
    began = take_unended(request)
    known = stored(request)
    return strike(request, unended, began) if known is None and began is not None else known


def stored(request: Request) -> Result | None:
    """The result of an earlier process, unless it has expired."""
    known = _read(_path(request))
    reason, differs = known.get("reason", ...), known.get("differs")
    if not isinstance(reason, str | None) or not isinstance(differs, bool):
        return None
    if reason and not differs and _age(known) > _DAY:
        return None
    return Result(reason and rejected(f"{reason} ({known.get('date')})"), differs)


def store(request: Request, result: Result) -> None:
    """Stores a result. If the folder can't be written, each process runs the check."""
    reason = result.reason and result.reason.removeprefix(rejected(""))
    write(request, reason=reason, differs=result.differs)


def strike(request: Request, why: str, began: float, again: bool = False) -> Result | None:
    """A check ended without an answer. None if it is to run again; the rejection if a check that
    began after an earlier strike ended like this, too. Processes that were at the check together
    give one strike.

    began: the time at which the check began.  again: whether this process gave a strike before.
    """
    earlier = _read(_path(request))
    is_second = "strike" in earlier and _age(earlier) <= _DAY
    if is_second and not again and began <= earlier["time"]:
        return None
    if is_second or again:
        result = Result(rejected(f"{why[:2000]}, twice"))
        store(request, result)
        return result
    write(request, strike=why[:2000])
    LOG.warning(
        "q2compile: the check of %s ended without an answer (%s) and is run again",
        *(request.label, why.splitlines()[0]),
    )
    return None


def log_begun(request: Request, result: Result | None) -> None:
    """A line in the log before a check runs."""
    if result is None:
        LOG.debug("q2compile: checks %s", request.label)


def remember(request: Request, choice: Sequence[int]) -> None:
    """Stores numbers that were chosen by measuring, in place of a result."""
    write(request, choice=list(choice))


def remembered(request: Request) -> list[int] | None:
    """The numbers that `remember` stored; None if there are none."""
    choice = _read(_path(request)).get("choice")
    is_whole = isinstance(choice, list) and all(isinstance(each, int) for each in choice)
    return choice if is_whole else None


def is_struck(request: Request) -> bool:
    """Whether the check has a strike, and no result."""
    return "strike" in _read(_path(request))


def rejections() -> tuple[str, ...]:
    """Names of the stored rejections, which are part of the keys of Inductor's caches."""
    folder = cache_dir()
    with suppress(OSError):
        return _rejections(folder, folder.stat().st_mtime_ns, len(KNOWN.checks))
    return ()


@functools.lru_cache(1)
def _rejections(folder: Path, changed: int, known: int) -> tuple[str, ...]:
    """changed, known: differ whenever a result was stored."""
    paths = sorted(folder.glob("*.checked"))
    return tuple(path.stem for path in paths if _read(path).get("reason"))


def forget_rejections() -> list[str]:
    """Deletes the rejections and strikes that are stored, so that these kernels are checked again.
    Returns what each was of, in words."""
    words = []
    for path in sorted(cache_dir().glob("*.checked")):
        known = _read(path)
        if known.get("reason") or "strike" in known:
            words.append(f"{known.get('what')}: {known.get('reason') or known.get('strike')}")
            path.unlink(missing_ok=True)
    _rejections.cache_clear()
    return words


def mark(request: Request) -> None:
    """Marks that this process runs the check, by a file that is locked until the process ends,
    however it does: in other containers and on other machines, too. Where no file can be locked
    there is no mark."""
    unmark(request)
    own = f".{os.getpid()}-{secrets.token_hex(4)}"
    path = _path(request).with_suffix(f"{own}.checking")
    unfinished = path.with_suffix(".unfinished")
    try:
        file = unfinished.open("w", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(json.dumps({"time": time.time()}))
        file.flush()
        os.replace(unfinished, path)
        _MARKS[request.check] = path, file
    except (OSError, AttributeError):
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def unmark(request: Request) -> None:
    """Removes that mark."""
    with suppress(OSError, KeyError):
        path, file = _MARKS.pop(request.check)
        with file:
            path.unlink(missing_ok=True)


def take_unended(request: Request) -> float | None:
    """When the last process that ended while it ran the check had begun it; None if none did. Their
    marks are removed, and a mark that another process has removed is that one's."""
    path, began = _path(request), []
    for marker in path.parent.glob(f"{path.stem}.*.checking"):
        with suppress(OSError, AttributeError), marker.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process is running
            known = _read(marker)
            marker.unlink()
            began.append(float(known.get("time", 0.0)))
    return max(began, default=None)


def named(device: torch.device) -> tuple[str, int, int]:
    """The properties of a device that kernels depend on."""
    if device.type != "cuda":
        return device.type, 0, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.major, properties.minor


def _path(request: Request) -> Path:
    op, name, device, *what = request.check
    key = hashlib.sha256()
    sources = sources_of(request.sources)
    for part in (op, name, *what, *named(device), *versions(), sources):
        key.update(f"{part!r}\0".encode())
    return cache_dir() / f"{op}-{key.hexdigest()[:24]}.checked"


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; nothing if it is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _age(known: dict[str, Any]) -> float:
    """The age of a result in seconds. If the clock was set back, the result counts as old."""
    age = time.time() - known.get("time", 0.0)
    return age if age >= 0 else _DAY + 1


def write(request: Request, **parts: Any) -> None:
    """Writes all or nothing: another process may read the file meanwhile."""
    path = _path(request)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    now = {"date": datetime.date.today().isoformat(), "time": time.time()}
    content = {"what": request.label, **parts, **now, "versions": versions()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


@functools.cache
def sources_of(folders: tuple[str, ...]) -> str:
    """A hash of the kernels' sources, and of those in other folders."""
    return hash_of(Path(__file__).parent, *map(Path, folders))
