# SPDX-License-Identifier: Apache-2.0
"""That a kernel agrees with the reference on a GPU like this one, kept on disk beside the cubins:
an empty file a check, named by a hash of the check, the device, the versions and the sources.

So a machine checks a kernel once, not each of its processes. A disagreement is not kept, and is
found again by the next one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import torch

from q2compile.runtime_kernels.cuda.jit import nvrtc

Check = tuple  # an op, the kernel's name, the device, and with what
_KERNELS = Path(__file__).parents[1]  # runtime_kernels
_SUFFIXES = (".py", ".cu", ".cuh")


def is_kept(check: Check, sources: Sequence[Path] = ()) -> bool:
    """sources: folders of what the kernel is written in, besides runtime_kernels."""
    return _path(check, sources).exists()


def keep(check: Check, sources: Sequence[Path] = ()) -> None:
    """A folder that can't be written costs a check a process, no more."""
    path = _path(check, sources)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return


def _path(check: Check, sources: Sequence[Path]) -> Path:
    op, name, device, *what = check
    key = hashlib.sha256()
    for part in (op, name, *what, *_named(device), *_versions(), _hash(tuple(sources))):
        key.update(f"{part}\0".encode())
    return nvrtc.cache_dir() / f"{op}-{key.hexdigest()[:24]}.checked"


def _named(device: torch.device) -> tuple[str, int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.major, properties.minor


def _versions() -> tuple[str, ...]:
    """Of what compiles kernels, or brings them."""
    found = [torch.__version__, str(torch.version.cuda)]
    for package in ("triton", "nvidia-cuda-nvrtc"):
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return tuple(found)


@functools.cache
def _hash(sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for folder in (_KERNELS, *sources):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
