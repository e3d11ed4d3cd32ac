"""`q2compile bench`: measures the machine it is on, in some minutes.

    q2compile bench [--only GROUP,...] [--out FILE] [--no-remember]

Prints a table and writes the same as JSON, with the device and the versions, to be sent back. On a
GPU that has several kernels for 4-bit products it remembers which was the fastest at each shape,
for this device (runtime_kernels/cuda/gemm/remembered.py); --no-remember only measures. On a CPU all
is the torch reference at small sizes, which shows that it works and nothing about speed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from q2compile.errors import ConfigError, one_of
from q2compile.report.page.headline import time_words
from q2compile.runtime_kernels.cuda.gemm.remembered import remember
from q2compile.tools.bench.measurements import BUSY, GROUPS, Bench, Row, measured
from q2compile.version import __version__

SCHEMA = 1
_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where something could not be measured."""
    description = "Measures this machine: quantizers, GEMMs, a linear, a Llama's block, the host."
    parser = argparse.ArgumentParser(prog="q2compile bench", description=description)
    parser.add_argument(
        "--only",
        metavar="GROUPS",
        default=",".join(GROUPS),
        help="what to measure, with commas between; default %(default)s",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("q2compile-bench.json"),
        help="the JSON file to write; default %(default)s",
    )
    parser.add_argument("--no-remember", action="store_true", help="remember no fastest kernels")
    options = parser.parse_args(argv)
    groups = [one_of("group in --only", name, GROUPS) for name in options.only.split(",")]
    if not options.out.parent.is_dir():
        raise ConfigError(f"--out: {options.out.parent} is not a folder")
    if options.out.is_dir():  # said before the minutes that measuring takes
        raise ConfigError(f"--out: {options.out} is a folder; allowed: a file's name in one")
    start = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench.of(device)
    about = _about(device)
    print(f"device    {about['device']['name']}{'' if bench.on_gpu else _ON_CPU}")
    print("versions  " + ", ".join(f"{name} {of}" for name, of in about["versions"].items()))
    if bench.sheet is None and bench.on_gpu:
        print("predicted nothing: there is no data sheet of this GPU in q2compile/cost_model")
    group = ""
    for row in measured(bench, groups):
        if row.group != group:
            group = row.group
            print(f"\n{group}", flush=True)
        print(line(row), flush=True)
    print()
    if bench.choices:
        print(_remembered(bench, about["date"], options.no_remember))
    seconds = time.perf_counter() - start
    result = {
        "schema": SCHEMA,
        **about,
        "command": f"q2compile bench --only {options.only}",
        "seconds": round(seconds, 1),
        "rows": [_to_json(row) for row in bench.rows],
        "fastest": [choice._asdict() for choice in bench.choices],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out} written, after {seconds:.0f} s")
    return int(any(row.microseconds is None and _is_fault(row) for row in bench.rows))


_ON_CPU = ": no GPU that torch sees. All is the torch reference, at small sizes; no time means much"


def _is_fault(row: Row) -> bool:
    """Whether a row without a figure is more than a kernel that another GPU is for, or noise."""
    return not row.why.startswith(("ValueError: kernel", BUSY))


def line(row: Row) -> str:
    """A row of the table."""
    shape = "x".join(map(str, row.shape))
    head = f"  {row.name:42} {shape:18}"
    if row.microseconds is None:
        return f"{head} not measured: {row.why}"
    parts = [f"{head} {row.microseconds:10.1f} us"]
    if row.ratio is not None:
        of = f"{row.ratio:.2f} copies" if row.beside == "copy" else time_words(row.ratio)
        parts.append(of)
    if row.predicted is not None:
        parts.append(f"predicted {row.predicted:.1f} us, {row.predicted / row.microseconds:.2f}")
    return "; ".join([*parts, *filter(None, [row.why])])


def _remembered(bench: Bench, date: str, no_remember: bool) -> str:
    """Writes down which candidate is the fastest at each shape, and says so."""
    counts: dict[str, int] = {}
    for choice in bench.choices:
        counts[choice.fastest] = counts.get(choice.fastest, 0) + 1
    said = ", ".join(f"{name} at {n}" for name, n in counts.items())
    text = f"fastest   of {len(bench.choices)} products: {said}; "
    if no_remember:
        return text + "not remembered"
    path = remember(bench.device.index, bench.choices, date)
    return (
        text + f"remembered in {path}. From now on products of such shapes take it; results may "
        "differ by their rounding, since sums are in another order. Q2COMPILE_GEMM_CHOICES=off "
        "leaves that out, deleting the file forgets it"
    )


def _about(device: torch.device) -> dict[str, Any]:
    versions = {
        "q2compile": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "device": _device(device),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": f"CPU ({platform.machine()})", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _driver(device.index),
    }


def _driver(index: int) -> str | None:
    """The version of the NVIDIA driver; None where nvidia-smi does not say it."""
    asked = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _to_json(row: Row) -> dict[str, Any]:
    found = asdict(row)
    found["ratio"] = row.ratio
    for name in ("microseconds", "beside_microseconds", "predicted", "ratio"):
        if found[name] is not None:
            found[name] = round(found[name], 3)
    return {name: value for name, value in found.items() if value not in (None, "")}


if __name__ == "__main__":
    raise SystemExit(main())
