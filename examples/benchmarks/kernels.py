"""Times the CUDA kernels against a bf16 device copy of the same tensor, and writes one JSON file.

    python examples/benchmarks/kernels.py [--out FILE] [--shapes 8192x4096,16384x8192]

One unit is the time of copying the bf16 tensor to another place on the device, in the same run.
Each kernel is captured into a CUDA graph of several calls over rotating inputs, so that neither
the host nor the cache is timed; kernels and copy take turns, and the ratio of each round enters a
median. Both phases of a quantiser are included, allocations are not (they are made in the capture).

The floor is what the bytes alone would take: bytes moved over the copy's, at the copy's speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda import nvrtc, rotation
from q2compile.runtime_kernels.cuda.dequantize import dequantize

assert runtime_kernels  # importing it registers the ops
OUT = Path(__file__).parent / "results" / "kernels.json"
SCHEME, SOURCE, TRANSFORM = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2", "rht128"
INPUTS = 4  # 4 x 64 MiB at least: more than the L2 cache holds
CALLS = 8  # a graph
ROUNDS = 40
# Bytes an element: read, then written (phase 2 moves 1/16 of the elements, 5 bytes each).
BYTES = {
    "copy": 2 + 2,
    "rht_quantize_row": 2 + 0.75 + 5 / 16,
    "rht_quantize_col": 2 + 0.75 + 5 / 16,
    "rht_quantize_both": 2 + 2 * (0.75 + 5 / 16),
    "requantize": 0.5625 + 0.75 + 5 / 16,
    "dequantize": 0.5625 + 2,
}


def cases(rows: int, cols: int) -> dict[str, list[Callable[[], object]]]:
    """name -> one call for each of the inputs."""
    device = torch.device("cuda", torch.cuda.current_device())
    xs = [torch.randn(rows, cols, device=device).bfloat16() for _ in range(INPUTS)]
    target = torch.empty_like(xs[0])
    row_seed, col_seed = (torch.tensor(s, device=device) for s in (1, 2))
    packed = [torch.ops.q2.quantize(x, None, None, SOURCE, 0) for x in xs]
    args = (SCHEME, TRANSFORM)

    def row(x):
        return rotation.rht_quantize(x, row_seed, *args, False, 0)

    def col(x):
        return rotation.rht_quantize(x, col_seed, *args, True, 0)

    def both(x):
        return rotation.rht_quantize_both(x, row_seed, col_seed, *args, 0)

    def requantize(p):
        return rotation.requantize(*p, col_seed, SOURCE, *args, cols, 1)

    def widen(p):
        return dequantize(*p, SOURCE, cols, torch.bfloat16)

    def bind(function, inputs):
        return [lambda i=i: function(i) for i in inputs]

    return {
        "copy": bind(target.copy_, xs),
        "rht_quantize_row": bind(row, xs),
        "rht_quantize_col": bind(col, xs),
        "rht_quantize_both": bind(both, xs),
        "requantize": bind(requantize, packed),
        "dequantize": bind(widen, packed),
    }


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of CALLS calls in turn."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    return graph


def time_in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """Microseconds a call, by round."""
    events = []
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        row = {}
        for name, graph in graphs.items():
            row[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            row[name][0].record()
            graph.replay()
            row[name][1].record()
        events.append(row)
    torch.cuda.synchronize()
    return {n: [1e3 * r[n][0].elapsed_time(r[n][1]) / CALLS for r in events] for n in graphs}


def host_microseconds(calls: list[Callable[[], object]], count: int = 400) -> float:
    """What a call costs the host, with the device never in its way. Median of 5."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            calls[0]()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def measure(rows: int, cols: int, about: dict) -> list[dict]:
    """One row of the result for each kernel at this shape."""
    times = time_in_turns({name: captured(calls) for name, calls in cases(rows, cols).items()})
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
            f"{name:20} {rows}x{cols:<6} {micro:8.1f} us {ratio:6.2f} copies "
            f"(floor {result['floor']:.2f}) {result['gb_per_s']:6} GB/s"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--shapes", default="8192x4096,16384x8192")
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
        "command": "python examples/benchmarks/kernels.py",
    }
    results = []
    for shape in args.shapes.split(","):
        rows, cols = (int(n) for n in shape.split("x"))
        results += measure(rows, cols, about)
    for name, calls in cases(256, 256).items():
        micro = host_microseconds(calls)
        results.append(
            {"name": f"host_{name}", "shape": [256, 256], "ratio": round(micro, 2)}
            | {"unit": "host microseconds a call", **about}
        )
        print(f"{name:20} {micro:8.1f} us of the host a call")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
