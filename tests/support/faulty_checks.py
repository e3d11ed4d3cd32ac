# SPDX-License-Identifier: Apache-2.0
"""Self-checks that end in every way a check of a kernel can, for the process that runs them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.check_results import Request

DEVICE = torch.device("cpu")


def request(how: str, folder: Path, name: str = "broken", op: str = "gemm") -> Request:
    """A check of a kernel that ends so. folder: where each run leaves a file."""
    return Request((op, name, DEVICE, how), __name__, (how, str(folder)))


def runs(folder: Path) -> list[str]:
    """How the checks end that were run so far."""
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def disagreement(how: str, folder: str) -> str | None:
    """Ends as `how` says."""
    (Path(folder) / f"{how}-{time.time_ns()}").touch()
    if how == "trap":
        os.kill(os.getpid(), signal.SIGILL)
    if how == "hang":
        time.sleep(1000)
    if how == "slow":
        time.sleep(2)
    while how == "long" and not (Path(folder).parent / "release").exists():
        time.sleep(0.02)
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if how == "raises":
        raise AssertionError("no scaled dot on sm_121")
    if how == "illegal":  # the context is lost, and all that follows fails
        error = RuntimeError("CUDA error: an illegal instruction was encountered")
        checks.device_error = lambda device: error  # type: ignore[assignment]
        raise error
    if how.startswith("inside "):  # another kernel runs in this one's check
        inner = request(how.removeprefix("inside "), Path(folder), "inner", "dequantize")
        assert checks.rejection(inner) is not None
    return "1 of 9 codes differ from the reference" if how == "wrong" else None
