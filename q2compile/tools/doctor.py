# SPDX-License-Identifier: Apache-2.0
"""Devices, versions, kernels and cubins of this machine, with a self-check of each kernel.

    q2compile doctor [--no-check] [--json]
    q2compile doctor --clear-cache

The self-check runs every kernel that serves the device, and the Inductor kernels of quantizers, on
small tiles. It compares results with the torch reference on the CPU: quantizers bit by bit, GEMMs
on a GPU to the rounding of the result. Every check runs anew. Those of a GPU run in a process of
their own with a time limit, and their results are kept for training. The exit status is 1 when a
kernel is rejected."""

import importlib.metadata
import json
import platform
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from q2compile.config import Config
from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import emulated
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.versions import cublaslt_version, driver_version
from q2compile.runtime_kernels.kernel_states import REJECTED
from q2compile.runtime_kernels.registry import KernelWarning
from q2compile.tools.clear_cache import clear_cache
from q2compile.tools.kernel_rows import Row, checked, device_rows

_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc")


def run(options: Namespace) -> int:
    """Prints the report. Returns the exit status: 0, or 1 when a kernel is at fault."""
    if options.clear_cache:
        print(f"cache     {clear_cache(cache_dir())}")
        return 0
    Config().disable()  # raises for names in the environment that no kernel has
    say: Callable[..., None] = _nothing if options.json else print
    start = time.perf_counter()
    report: dict[str, Any] = {"versions": _versions(say), "cache": _cache(say), "devices": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)  # the report says it
        if not torch.cuda.is_available():
            report["devices"].append(_cpu(not options.no_check, say))
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            report["devices"].append(_device(index, not options.no_check, say))
    report["seconds"] = round(time.perf_counter() - start, 1)
    lines = [line for device in report["devices"] for line in device["kernels"]]
    if lines and not options.no_check:
        say(f"checked   {len(lines)} kernels in {report['seconds']:.0f} s")
    if options.json:
        print(json.dumps(report, indent=1))
    return int(any(line["state"] == REJECTED for line in lines))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _versions(say: Callable[..., None]) -> dict[str, str | None]:
    """The packages that kernels for a GPU need are asked for where there is one."""
    on_gpu = torch.cuda.is_available()
    # torch with its build, 2.15.0+cu132, which metadata may lack
    found: dict[str, str | None] = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES if on_gpu else ():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if on_gpu:
        found |= {"driver": driver_version(), "cuBLASLt": cublaslt_version()}
    words = (f"{name} {of}" if of else f"no {name}" for name, of in found.items())
    say(f"versions  {', '.join(words)}")
    if on_gpu:
        try:
            found["NVRTC"] = "{}.{}".format(*nvrtc.version())
            say(f"compiler  NVRTC {found['NVRTC']}")
        except ImportError as error:
            found["NVRTC"] = None
            say(f"compiler  none: {error}")
    return found


def _cache(say: Callable[..., None]) -> dict[str, Any]:
    cubins = list(cache_dir().glob("*.cubin"))
    size = sum(path.stat().st_size for path in cubins) / 1024
    say(f"cubins    {len(cubins)} in {cache_dir()}, {size:.0f} KiB")
    return {"folder": str(cache_dir()), "cubins": len(cubins), "kib": round(size)}


def _cpu(check: bool, say: Callable[..., None]) -> dict[str, Any]:
    """Prints this processor and its kernels."""
    missing = build.why_missing()
    vectors = torch.backends.cpu.get_cpu_capability()
    target = f"no kernels: {missing}" if missing else f"kernels in C++ for {vectors}"
    say(f"device    cpu, none with CUDA; {target}; the rest runs as its torch reference")
    rows = [] if missing else list(device_rows(torch.device("cpu")))
    printed(rows, check, say)
    return {"device": "cpu", "name": vectors, "kernels": [row.as_line() for row in rows]}


def _device(index: int, check: bool, say: Callable[..., None]) -> dict[str, Any]:
    """Prints a device and its kernels, each before it is checked."""
    major, minor = torch.cuda.get_device_capability(index)
    reason = launch.unsupported(index)
    target = f"no kernels: {reason}" if reason else f"kernels for {launch.architecture(index)}"
    name = torch.cuda.get_device_name(index)
    say(f"device    cuda:{index} {name}, {major}.{minor}, {target}")
    stated = emulated.of_device(index)
    for text in stated:
        say(f"emulated  {text}")
    rows = list(device_rows(torch.device("cuda", index)))
    printed(rows, check, say)
    return {
        "index": index,
        "name": name,
        "capability": f"{major}.{minor}",
        "target": target,
        "emulated": stated,
        "kernels": [row.as_line() for row in rows],
    }


def printed(rows: list[Row], check: bool, say: Callable[..., None]) -> None:
    """Fills in the rows, and prints each: its name before its check runs."""
    names = max((len(row.name) for row in rows), default=0)
    schemes = max((len(row.scheme) for row in rows), default=0)
    last = ""

    def announce(row: Row) -> None:
        nonlocal last
        if row.op != last:
            last = row.op
            say(f"  {last}")
        say(f"    {row.name:{names}}  {row.scheme:{schemes}}  ", end="", flush=True)

    for row in checked(rows, check, announce):
        say(row)
