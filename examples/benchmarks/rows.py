# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmarks: which rows a script makes, where they go, what each carries.

A row has at least a name, a ratio and its unit, the device, the versions, the date, and the command
that makes it. It replaces the row of the same name, shape and mode in its file of `results/`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.jit import nvrtc

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """run: returns the rows, given the parsed arguments.
    file: name of the file in results/ that they go to.
    arguments: names of the script's own arguments that the benchmark reads.
    where: "gpu", "cpu", or "either", a GPU if there is one."""

    run: Callable[[Namespace], Iterable[Row]]
    file: str
    arguments: tuple[str, ...] = ()
    where: str = "gpu"


def run(
    script: str,
    description: str,
    benchmarks: Mapping[str, Benchmark],
    parser: ArgumentParser | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Run the benchmarks named by --only (all by default), print and write the rows of each."""
    parser = ArgumentParser() if parser is None else parser
    parser.description = description.splitlines()[0]
    parser.add_argument("--only", metavar="NAME,...", help="of " + ", ".join(benchmarks))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(benchmarks)
    if unknown := [name for name in names if name not in benchmarks]:
        parser.error(f"--only {','.join(unknown)}: give names of {', '.join(benchmarks)}")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and any(benchmarks[name].where == "gpu" for name in names):
        sys.exit(f"examples/benchmarks/{script}.py needs a CUDA device, and torch sees none.")
    for name in names:
        benchmark = benchmarks[name]
        about = device_and_versions(on_gpu and benchmark.where != "cpu") | {
            "date": datetime.date.today().isoformat(),
            "command": _command(script, name, benchmark, args, parser),
        }
        rows = []
        for row in benchmark.run(args):
            print(summary(row), flush=True)
            rows.append({**row, **about})
        write(args.out / benchmark.file, rows)


def _command(
    script: str, name: str, benchmark: Benchmark, args: Namespace, parser: ArgumentParser
) -> str:
    """The command that makes the rows of this benchmark, without default arguments."""
    words = [f"python examples/benchmarks/{script}.py --only {name}"]
    for argument in benchmark.arguments:
        value = getattr(args, argument)
        if value != parser.get_default(argument):
            values = map(str, value) if isinstance(value, list) else [str(value)]
            words.append(f"--{argument} {' '.join(values)}")
    return " ".join(words)


def device_and_versions(gpu: bool) -> Row:
    if gpu:
        major, minor = nvrtc.version()
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        return {
            "gpu": torch.cuda.get_device_name(),
            "versions": {**versions, "nvrtc": f"{major}.{minor}"},
        }
    packages = ("q2compile", "torch", "transformers")
    return {
        "device": f"{_cpu_name()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def over_bf16(name: str, own: float, bf16: float, unit: str) -> Row:
    """A row that compares a value with BF16's in the same run."""
    values = {"value": round(own, 4), "bf16": round(bf16, 4)}
    return {"name": name, "ratio": round(own / bf16, 3), "unit": unit, **values}


def summary(row: Row) -> str:
    """One line; values that are tables are left to the file."""
    shape = "x".join(map(str, row.get("shape", ())))
    short = {k: v for k, v in row.items() if k not in ("name", "shape", "ratio", "unit")}
    rest = ", ".join(f"{k} {v}" for k, v in short.items() if not isinstance(v, dict | list))
    return f"{row['name']:28} {shape:12} {row['ratio']!s:>8} {row['unit']}  {rest}"


def key(row: Row) -> tuple[Any, ...]:
    return row["name"], *row.get("shape", ()), row.get("mode", "default")


def write(path: Path, rows: Iterable[Row]) -> None:
    known = json.loads(path.read_text()) if path.exists() else []
    merged = {key(row): row for row in (*known, *rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=1) + "\n")
