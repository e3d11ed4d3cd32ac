# SPDX-License-Identifier: Apache-2.0
"""Facts of a run: versions, commit, device, date, command, options."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from q2compile import __version__
from q2compile.config import Config, changed_options
from q2compile.runtime_kernels.versions import version_of


class RunFacts:
    """Facts of this process, for a dump's run.json and the foot of its page."""

    def __init__(self) -> None:
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._options: list[dict[str, Any]] = []

    def add(self, config: Config) -> None:
        """The options of one more graph."""
        if (given := _given(config)) not in self._options:
            self._options.append(given)

    def to_json(self) -> dict[str, Any]:
        """options: one mapping for each that a graph was compiled with, without defaults. commit:
        of the git repository that the program was started in, null without one."""
        return {
            "versions": _versions(),
            "commit": _commit(),
            "device": _device(),
            "date": self._date,
            "command": shlex.join(sys.orig_argv),
            "options": self._options,
        }


def _given(config: Config) -> dict[str, Any]:
    """Options that differ from the defaults, as JSON; objects that JSON lacks by their repr."""
    plain = {
        k: dict(v) if isinstance(v, Mapping) else v for k, v in changed_options(config).items()
    }
    read: dict[str, Any] = json.loads(json.dumps(plain, default=repr))
    return read


@cache
def _versions() -> dict[str, str]:
    """Versions of what is installed. cuda: the version that torch was built for."""
    versions = {
        "q2compile": __version__,
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return {name: version for name, version in versions.items() if version}


@cache
def _commit() -> str | None:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _device() -> str:
    """The GPU that is in use. A program that uses none does not initialize CUDA for this."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()})"
