# SPDX-License-Identifier: Apache-2.0
"""Devices, versions, kernels and cubins of this machine, with a self-check of each kernel.

    q2compile doctor [--verbose] [--no-check] [--json]
    q2compile doctor --recheck
    q2compile doctor --sweep
    q2compile doctor --clear-cache

Layers of each published recipe are traced, and every kernel that they run on the device is checked
on small calls. Results are compared with the torch reference on the CPU: quantizers bit by bit,
GEMMs on a GPU to the rounding of the result. Every check runs anew. Those of a GPU run in a process
of their own with a time limit, and their results are kept for training. The exit status is 1 when a
kernel is rejected. With --recheck only the kernels that are rejected so far are checked; what is
not on the list, such as a large GEMM, is checked before its next use. With --sweep only GEMMs are
checked, at counts of rows from 1 to 4096: a kernel may be wrong at a single one.

The first line is the result. Kernels that passed are lines only with --verbose. The kernel that is
being checked is shown on a terminal, so that a check that hangs has a name."""

import json
import platform
import re
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config, disable_named_kernels
from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.cache_folder import cache_dir, why_temporary
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import emulated
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.known_bad import known_bad
from q2compile.runtime_kernels.kernel_states import REJECTED
from q2compile.runtime_kernels.registry import KernelWarning
from q2compile.runtime_kernels.versions import cublaslt_version, driver_version, version_of
from q2compile.tools.kernel_rows import (
    PASSED,
    SERVES,
    KernelRow,
    checked_rows,
    device_rows,
    rejected_rows,
    sweep_rows,
)

# Compiled kernels, results of self-checks, marks of those that never ended, and gemm-*.json, which
# 0.2 wrote: each named by a hash. The folder may be shared, by Q2COMPILE_CACHE_DIR, with files of
# others.
_OWN = re.compile(r".+-[0-9a-f]{24}\.(cubin|checked|[\w-]+\.checking|so)|gemm-[0-9a-f]{24}\.json")
_STATED = (PASSED, SERVES, REJECTED)
_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc")


def run(options: Namespace) -> int:
    """Prints the report. Returns the exit status: 0, or 1 when a kernel is at fault."""
    if options.clear_cache:
        print(f"cache     {_clear(cache_dir())}")
        return 0
    if options.sweep and not torch.cuda.is_available():
        print("q2compile doctor: --sweep checks GEMMs of a GPU; torch finds none", file=sys.stderr)
        return 2
    disable_named_kernels(Config())  # raises for names in the environment that no kernel has
    lines: list[str] = []
    report: dict[str, Any] = {"versions": _versions(lines), "cache": _cache(lines), "devices": []}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)  # the report says it
        of = sweep_rows if options.sweep else device_rows
        rows = {device: _rows(device, of) for device in _devices()}
        if options.recheck:
            rows = {device: rejected_rows(of_device) for device, of_device in rows.items()}
            report["recheck"] = check_results.forget_rejections()
            lines += [f"recheck   {text}" for text in report["recheck"] or ["nothing is rejected"]]
        for device, of_device in rows.items():
            report["devices"].append(_device(device, of_device, options, lines))
    report["seconds"] = round(time.perf_counter() - start, 1)
    states = Counter(row["state"] for device in report["devices"] for row in device["kernels"])
    text = json.dumps(report, indent=1) if options.json else "\n".join(lines)
    print(text if options.json else f"{_result(states, report['seconds'])}\n{text}")
    return int(states[REJECTED] > 0)


def _clear(folder: Path) -> str:
    """Deletes q2compile's own files in a folder; says how many and how large they were. Deleted
    files are recreated when they are needed.

    Raises:
        OSError: a file can't be deleted.
    """
    files = [path for path in folder.glob("*") if _OWN.fullmatch(path.name)]
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    return f"{len(files)} files deleted in {folder}, {size / 1024:.0f} KiB"


def _result(states: Counter[str], seconds: float) -> str:
    """The result in one line, such as "all 155 kernels passed their checks in 10 s"."""
    if states[REJECTED]:
        what = (
            f"FAULT: {states[REJECTED]} kernels failed their checks, and training leaves them out"
        )
    elif states[PASSED]:
        what = f"all {states[PASSED]} kernels passed their checks in {seconds:.0f} s"
    elif states[SERVES]:
        what = f"{states[SERVES]} kernels serve this machine; they were not checked"
    else:
        what = "no kernel serves this machine; every op runs as its torch reference"
    others = {state: count for state, count in states.items() if state not in _STATED}
    return "; ".join([f"result    {what}", *(f"{n} are {state}" for state, n in others.items())])


def _versions(lines: list[str]) -> dict[str, str | None]:
    """Versions; packages that only kernels for a GPU need are asked for if there is a GPU."""
    on_gpu = torch.cuda.is_available()
    # torch with its build, 2.15.0+cu132, which metadata may lack
    found: dict[str, str | None] = {"Python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        found |= {package: version_of(package) for package in _PACKAGES}
        found |= {"driver": driver_version(), "cuBLASLt": cublaslt_version()}
    words = (f"{name} {of}" if of else f"no {name}" for name, of in found.items())
    lines.append(f"versions  {', '.join(words)}")
    if on_gpu:
        try:
            found["NVRTC"] = "{}.{}".format(*nvrtc.version())
            lines.append(f"compiler  NVRTC {found['NVRTC']}")
        except ImportError as error:
            found["NVRTC"] = None
            lines.append(f"compiler  none: {error}")
    return found


def _cache(lines: list[str]) -> dict[str, Any]:
    cubins = list(cache_dir().glob("*.cubin"))
    size = sum(path.stat().st_size for path in cubins) / 1024
    lines.append(f"cubins    {len(cubins)} in {cache_dir()}, {size:.0f} KiB")
    if (why := why_temporary()) is not None:
        lines.append(f"cache     is temporary: {why}")
    found = {"folder": str(cache_dir()), "cubins": len(cubins), "kib": round(size)}
    return {**found, "temporary": why}


def _devices() -> list[torch.device]:
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _rows(
    device: torch.device, of: Callable[[torch.device], Iterable[KernelRow]]
) -> list[KernelRow]:
    missing = device.type == "cpu" and build.why_missing()
    return [] if missing else list(of(device))


def _device(
    device: torch.device, rows: list[KernelRow], options: Namespace, lines: list[str]
) -> dict[str, Any]:
    """A GPU, or this processor, and its kernels."""
    if device.type == "cpu":
        missing = build.why_missing()
        vectors = torch.backends.cpu.get_cpu_capability()
        target = f"no kernels: {missing}" if missing else f"kernels in C++ for {vectors}"
        lines.append(
            f"device    cpu, none with CUDA; {target}; the rest runs as its torch reference"
        )
        about: dict[str, Any] = {"device": "cpu", "name": vectors}
    else:
        index = device.index
        major, minor = torch.cuda.get_device_capability(index)
        reason = launch.unsupported(index)
        target = f"no kernels: {reason}" if reason else f"kernels for {launch.architecture(index)}"
        about = {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "capability": f"{major}.{minor}",
            "target": target,
            "emulated": emulated.of_device(index),
            "known_bad": known_bad((major, minor)),
        }
        lines.append(f"device    cuda:{index} {about['name']}, {major}.{minor}, {target}")
        lines += [f"emulated  {text}" for text in about["emulated"]]
        lines += [f"known bad {text}" for text in about["known_bad"]]
    lines += kernel_lines(rows, not options.no_check, options.verbose)
    return {**about, "kernels": [row.as_line() for row in rows]}


def kernel_lines(rows: list[KernelRow], check: bool, verbose: bool) -> list[str]:
    """Fills in the rows. Returns a line for each below its op; ``verbose``: also for kernels that
    serve the device and are not at fault."""
    names = max((len(row.name) for row in rows), default=0)
    schemes = max((len(row.scheme) for row in rows), default=0)
    lines: list[str] = []
    last = ""
    for row in checked_rows(rows, check, _show_on_terminal):
        if row.state in (PASSED, SERVES) and not verbose:
            continue
        if row.op != last:
            last = row.op
            lines.append(f"  {last}")
        lines.append(f"    {row.name:{names}}  {row.scheme:{schemes}}  {row}")
    _show_on_terminal(None)
    return lines


def _show_on_terminal(row: KernelRow | None) -> None:
    """The kernel that is being checked, in one line that the next replaces."""
    if sys.stderr.isatty():
        text = "" if row is None else f"checking {row.op} {row.name} {row.scheme}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
