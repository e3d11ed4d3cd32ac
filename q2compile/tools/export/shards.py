# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, written as tensors come."""

from __future__ import annotations

import json
import os
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
    """``folder`` as a path. Raises ConfigError if something is there already."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(f"export: folder: got {shown(folder)}; allowed: a path")
    path = Path(folder).absolute()
    if path.is_dir() and not any(path.iterdir()):
        return path
    if path.exists() or path.is_symlink():
        what = "is a folder that is not empty" if path.is_dir() else "is no folder"
        raise ConfigError(f"export: {path} {what}; give the path of one that is not there yet")
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` to write into. It becomes ``path`` at the end, and is removed if
    anything raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield unfinished
        unfinished.chmod(0o777 & ~_umask())  # mkdtemp's is for one user alone
        os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


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
        assert name not in self.names and name not in self._tensors, name
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
