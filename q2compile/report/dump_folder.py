# SPDX-License-Identifier: Apache-2.0
"""Dumps: every stage of every graph as text, one folder per graph.

graphs/
    report.json, report.txt
    run.json                       versions, commit, device, date, command, options
    graph_0/
        0_dynamo.txt               as Dynamo captured it
        1_rewritten.txt            matmuls replaced by q2.linear
        2_forward.txt              after AOTAutograd and the partitioner
        3_backward.txt
        4_after_passes_forward.txt
        4_after_passes_backward.txt
        5_output_code_forward.py   what Inductor generated
        5_output_code_backward.py
        passes.json                per pass: matches, time, change in op counts
        nodes.json                 per stage and node: lines of source, Dynamo's node; and what
                                   the backward takes from the forward
        reproduce_*.py             of a stage that failed: builds its graph again and runs it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from q2compile.errors import ConfigError, shown
from q2compile.report.graph_record import GraphRecord
from q2compile.report.process_lock import locked
from q2compile.report.report import RunReport
from q2compile.torch_internals.ranks import process_rank, world_size

_MARKER = ".q2compile"
_RUN = "run.json"
_REPORTS = ("report.json", "report.txt", "report.html", _RUN)


class DumpFolder:
    """The folder of one process's dumps: the named folder, ``rank<r>`` inside it if there are more
    ranks, or ``process<pid>`` while another process dumps into it.

    The first use in a process removes what an earlier run left: ``graph_<n>`` folders and reports,
    and only in a folder that q2compile itself marked. Files of these names in an unmarked folder
    belong to the user, and raise an error."""

    # A forked process inherits the table, not the folders.
    _open: dict[tuple[int, Path], DumpFolder] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = RunReport()
        self.report.on_change = self.write_report
        _make(path)
        ours = _linkless(path / _MARKER).exists()
        theirs = [name for name in _REPORTS if not ours and _linkless(path / name).exists()]
        if theirs:
            raise ConfigError(
                f"dump: {path} holds {', '.join(theirs)}, which q2compile did not write and would "
                "replace; name another folder, or move it away"
            )
        self._lock = _locked(path / _MARKER)
        if self._lock is None:
            self.path = path = path / f"process{os.getpid()}"
            warnings.warn(
                f"q2compile: another process dumps into {path.parent}; this one goes to {path}",
                RuntimeWarning,
                stacklevel=2,
            )
            _make(path)
            self._lock = _locked(path / _MARKER)
        elif ours:
            _remove_old(path)

    @classmethod
    def get(cls, path: str) -> DumpFolder:
        folder = Path(path, *_folder_of_rank())
        with _os_errors_as_config_errors(folder):
            folder = folder.resolve()
        key = os.getpid(), folder
        if key not in cls._open:
            cls._open[key] = cls(folder)
        return cls._open[key]

    @classmethod
    def forget_all(cls) -> None:
        """Forget all folders, as in a new process: the next graph starts its folder anew."""
        cls._open.clear()

    def new_graph(self) -> tuple[Path, GraphRecord]:
        """The folder of one more graph, and what writes into it."""
        number = self.report.graphs
        path = self.path / f"graph_{number}"
        _make(path)
        if not _is_dump(path):
            raise ConfigError(
                f"dump: {path} holds files that q2compile did not write; name another folder, or "
                "move it away"
            )
        return path, GraphRecord(number, lambda name, text: _write(path / name, text))

    def write_report(self) -> None:
        """report.json (the rows), report.txt (the table and the notes), run.json (`RunFacts`)."""
        _replace(self.path / "report.json", json.dumps(self.report.to_json(), indent=1) + "\n")
        _replace(self.path / "report.txt", f"{self.report.text()}\n")
        _replace(self.path / _RUN, json.dumps(self.report.run.to_json(), indent=1) + "\n")


def _folder_of_rank() -> tuple[str, ...]:
    """The folder of this rank, if there is more than one."""
    return (f"rank{process_rank()}",) if world_size() > 1 else ()


def _is_dump(folder: Path) -> bool:
    """Whether the folder of a graph is empty, or holds what a dump begins with."""
    return (folder / "0_dynamo.txt").exists() or not any(folder.iterdir())


def _remove_old(path: Path) -> None:
    """Files that earlier runs left: reports, graphs, and the folders of ended processes."""
    for old in path.iterdir():
        if old.is_symlink() or not old.is_dir():
            continue
        if re.fullmatch(r"graph_\d+", old.name) and _is_dump(old):
            shutil.rmtree(old)
        elif re.fullmatch(r"process\d+", old.name) and (old / _MARKER).exists():
            lock = _locked(old / _MARKER)
            if lock is not None:
                shutil.rmtree(old)
                lock.close()
    for name in _REPORTS:
        (path / name).unlink(missing_ok=True)


def _locked(marker: Path) -> TextIO | None:
    """Open and lock the file, which says what the folder is; None if another process has it."""
    with _os_errors_as_config_errors(marker):
        file = locked(_linkless(marker))
        if file is not None and file.tell() == 0:
            file.write("written by q2compile; its dumps are replaced on the next run\n")
            file.flush()
    return file


@contextmanager
def _os_errors_as_config_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system for a path into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise _cannot(path, str(error.strerror or error)) from None
    except (ValueError, RuntimeError) as error:  # NUL, a surrogate; a loop of links
        if isinstance(error, ConfigError):
            raise
        raise _cannot(path, str(error)) from None


def _linkless(path: Path) -> Path:
    """Return ``path``. Raises for a link: it could lead out of the named folder."""
    if path.is_symlink():
        raise _cannot(path, "it is a symbolic link")
    return path


def _make(folder: Path) -> None:
    """Return the folder, and create it if needed."""
    with _os_errors_as_config_errors(folder):
        _linkless(folder).mkdir(parents=True, exist_ok=True)


def _write(path: Path, text: str) -> None:
    """Write a text. Characters that are not valid Unicode, as in a model's names, are escaped."""
    with _os_errors_as_config_errors(path):
        _linkless(path).write_text(text, encoding="utf-8", errors="backslashreplace")


def _replace(path: Path, text: str) -> None:
    """Write atomically (rename): readers never see a partial file."""
    new = path.with_name(f".{path.name}")
    _linkless(path)
    _write(new, text)
    with _os_errors_as_config_errors(path):
        new.replace(path)


def _cannot(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"dump: cannot write {shown(str(path))[1:-1]}: {why}; name a folder with room that you may "
        "write to, or leave 'dump' out"
    )
