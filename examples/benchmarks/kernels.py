"""Times the CUDA kernels against a bf16 device copy of the same tensor, and writes one JSON file.

    python examples/benchmarks/kernels.py [--out FILE] [--shapes 8192x4096,...] [--only NAME,...]

One unit is the time of copying the bf16 tensor to another place on the device, in the same run.
Each kernel is captured into a CUDA graph of several calls over rotating inputs, so that neither
the host nor the cache is timed; kernels and copy take turns, and the ratio of each round enters a
median. All launches of an op are included, allocations are not (they are made in the capture). The
host's own cost is timed apart, on a small matrix.

The floor is what the bytes alone would take: bytes moved over the copy's, at the copy's speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.tools.bench.cases import CASES, OTHERS, calls_of_host, calls_of_quantisers, step_of
from q2compile.tools.bench.timing import captured, host_microseconds, time_in_turns

OUT = Path(__file__).parent / "results" / "kernels.json"
INPUTS = 4  # 4 x 64 MiB at least: more than the L2 cache holds
DEVICE = torch.device("cuda", 0)


def bytes_of(name: str) -> float:
    """An element: read and written by all launches."""
    step = step_of(name, 1)
    return float(step.bits + step.bits_before) / 8


BYTES = {"copy": 4.0} | {name: bytes_of(name) for name in (*OTHERS, *CASES)}


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """Puts rows into a file of results, each in place of the one of its name and shape."""
    known = json.loads(path.read_text()) if path.exists() else []
    rows = {(row["name"], *row.get("shape", ())): row for row in (*known, *results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def measure(rows: int, cols: int, about: dict, only: set[str]) -> list[dict]:
    """One row of the result for each kernel at this shape; all, or those named and the copy."""
    names = [name for name in BYTES if not only or name in {*only, "copy"}]
    calls_of = calls_of_quantisers(DEVICE, rows, cols, INPUTS, names)
    times = time_in_turns({name: captured(calls()) for name, calls in calls_of.items()})
    results = []
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["copy"], strict=True))
        micro = statistics.median(own)
        result = {
            "name": name,
            "shape": [rows, cols],
            "ratio": round(ratio, 3),
            "unit": "bf16 device copies",
            "floor": round(BYTES[name] / BYTES["copy"], 3),
            "microseconds": round(micro, 2),
            "gb_per_s": round(rows * cols * BYTES[name] / micro / 1e3),
            **about,
        }
        results.append(result)
        print(
            f"{name:22} {rows}x{cols:<6} {micro:8.1f} us {ratio:6.2f} copies "
            f"(floor {result['floor']:.2f}) {result['gb_per_s']:6} GB/s"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--shapes", default="8192x4096,16384x8192")
    parser.add_argument("--only", default="", help="names of kernels; all, and the host, without")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("examples/benchmarks/kernels.py needs a CUDA device, and torch sees none.")
    major, minor = nvrtc.version()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvrtc": f"{major}.{minor}",
        },
        "date": datetime.date.today().isoformat(),
        "command": "python examples/benchmarks/kernels.py" + (args.only and f" --only {args.only}"),
    }
    results = []
    for shape in args.shapes.split(","):
        rows, cols = (int(n) for n in shape.split("x"))
        results += measure(rows, cols, about, set(filter(None, args.only.split(","))))
    for name, call in {} if args.only else calls_of_host(DEVICE).items():
        micro = host_microseconds(call)
        results.append(
            {"name": name, "shape": [256, 256], "ratio": round(micro, 2)}
            | {"unit": "host microseconds a call", **about}
        )
        print(f"{name:22} {micro:8.1f} us of the host a call")
    write(args.out, results)


if __name__ == "__main__":
    main()
