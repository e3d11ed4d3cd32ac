# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, written as tensors come."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from q2compile.errors import ConfigError, shown


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """``folder`` as a path that can be written. Raises ConfigError if something is there already,
    and if no folder can be made there: an export takes too long to find that out at its end."""
    named = str(os.fspath(folder)) if isinstance(folder, str | os.PathLike) else ""
    if not named or "\0" in named:
        raise ConfigError(f"export: folder: got {shown(folder)}; allowed: a path")
    path = Path(folder).absolute()
    try:
        is_there = path.exists() or path.is_symlink()
        if is_there and not path.is_dir():
            raise ConfigError(f"export: {path} is no folder; give the path of a new or empty one")
        if is_there and any(p.name != _OF_NEW_VOLUMES for p in path.iterdir()):
            raise ConfigError(
                f"export: {path} is a folder that is not empty; give the path of a new or empty one"
            )
        home = next(p for p in (path, *path.parents) if p.exists())
        with tempfile.TemporaryDirectory(prefix=".q2compile-", dir=home):
            pass
    except OSError as error:
        raise ConfigError(
            f"export: {shown(str(path))[1:-1]} can't be written: {error.strerror}; give the path "
            "of a new folder where you may write"
        ) from None
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into. What is in it appears at ``path`` at the end, and is removed if
    anything raises.

    It is beside ``path`` and takes its place, so that a new ``path`` appears whole. An empty folder
    that is there already may be the mount point of a volume, or a link, which nothing can replace:
    the folder is then inside it, and its files are moved out, the weights first.
    """
    is_there = path.is_dir()
    home = path if is_there else path.parent
    home.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=home))
    moved: list[Path] = []
    try:
        yield unfinished
        if is_there:
            for file in sorted(unfinished.iterdir(), key=lambda f: f.suffix != ".safetensors"):
                os.replace(file, path / file.name)
                moved.append(path / file.name)
            unfinished.rmdir()
        else:
            unfinished.chmod(0o777 & ~_umask())  # mkdtemp's is for one user alone
            os.replace(unfinished, path)
    except BaseException:
        for left in (unfinished, *moved):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        raise


_OF_NEW_VOLUMES = "lost+found"  # a new file system is not empty
_UNITS = {
    "": 1,
    **{f"{k}{i}B": (1024 if i else 1000) ** n for n, k in enumerate("KMGT", 1) for i in ("", "I")},
}


def size_in_bytes(size: object) -> int:
    """A number of bytes: an int, or a text such as "5GB" (10^9) or "5GiB" (2^30)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(\w*)", size.strip()) if isinstance(size, str) else None
    if found and found[2].upper() in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"export: max_shard_bytes: got {shown(size)}; allowed: a positive number of bytes, or "
            "a text such as '5GB', '500MB' or '2GiB'"
        )
    return size


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Shards:
    """A state dict in one or more safetensors files of at most ``limit`` bytes, one shard in memory
    at a time; an index beside them if there are more than one. Names are Hugging Face's."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._tensors: dict[str, Tensor] = {}
        self._bytes = self.total = 0
        self.names: dict[str, int] = {}  # of the tensors written so far -> number of the file

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self.names or name in self._tensors:
            raise ConfigError(
                f"export: the model has a tensor of its own that is called {name!r}, as the format "
                "calls one that belongs to the codes of a weight; rename the model's, or use "
                "another format"
            )
        tensor = tensor.detach().cpu()
        if self._tensors and self._bytes + tensor.nbytes > self._limit:
            self._write()
        # A copy of its own: safetensors writes no views, and a view would keep the whole in memory.
        self._tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += tensor.nbytes
        self.total += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and give the files their names."""
        self._write()
        count = max(self.names.values(), default=0)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return
        files = {n: f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}
        for number, name in files.items():
            self._path(number).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self.total},
            "weight_map": {name: files[number] for name, number in sorted(self.names.items())},
        }
        write_json(self._folder / "model.safetensors.index.json", index)

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"

    def _write(self) -> None:
        from safetensors.torch import save_file

        number = max(self.names.values(), default=0) + 1
        save_file(self._tensors, self._path(number), metadata={"format": "pt"})
        self.names |= dict.fromkeys(self._tensors, number)
        self._tensors, self._bytes = {}, 0


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
