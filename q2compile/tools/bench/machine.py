# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine in a report: the device, versions, and the state of the GPU."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from typing import Any

import torch

from q2compile import __version__
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.versions import cublaslt_version, version_of

_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas")
_STATE = (
    *("pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit"),
    *("temperature.gpu", "utilization.gpu", "memory.used"),
)
_REASONS = "clocks_throttle_reasons.active"


def about(device: torch.device) -> dict[str, Any]:
    """The device and the versions of all that compiles or runs kernels."""
    versions: dict[str, Any] = {
        "q2compile": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "nvrtc": _or_error(lambda: "{}.{}".format(*nvrtc.version())),
        "cublaslt": _or_error(cublaslt_version) if device.type == "cuda" else None,
    }
    versions |= {package: version_of(package) for package in _PACKAGES}
    settings = {name: value for name, value in os.environ.items() if name.startswith("Q2COMPILE_")}
    return {
        "device": _device(device),
        "versions": versions,
        "settings": settings,
        "date": datetime.date.today().isoformat(),
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": f"CPU ({platform.machine()})", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    reason = launch.unsupported(device.index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "kernels_for": launch.architecture(device.index) if reason is None else reason,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": asked(device.index, ["driver_version"]).get("driver_version"),
    }


def state(device: torch.device) -> dict[str, str]:
    """Clocks, power, temperature and why clocks are lowered; {} where nothing is known."""
    if device.type != "cuda":
        return {}
    return asked(device.index, [*_STATE, _REASONS]) or asked(device.index, _STATE)


def asked(index: int, fields: Any) -> dict[str, str]:
    """Fields of nvidia-smi; {} where it is not there or does not know one of them.

    nvidia-smi counts all GPUs: the one of this process is named by its UUID.
    """
    command = [
        "nvidia-smi",
        f"--id={_uuid(index)}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=False))


def _uuid(index: int) -> str:
    try:
        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except (AttributeError, AssertionError, RuntimeError):
        return str(index)


def _or_error(value: Any) -> str:
    try:
        return str(value())
    except Exception as error:  # whatever is wrong with an installation is in the report
        return f"none: {type(error).__name__}: {error}"[:80]
