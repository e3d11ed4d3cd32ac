"""Times the CUDA kernels against a bf16 device copy of the same tensor, and writes one JSON file.

    python examples/benchmarks/kernels.py [--out FILE] [--shapes 8192x4096,16384x8192]

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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda.calls import At
from q2compile.runtime_kernels.cuda.dequantize import dequantize
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import rotating_ops
from q2compile.runtime_kernels.cuda.transpose import transpose
from q2compile.runtime_kernels.numerics.schemes import WIDENED, get_scheme

assert runtime_kernels  # importing it registers the ops
OUT = Path(__file__).parent / "results" / "kernels.json"
INPUTS = 4  # 4 x 64 MiB at least: more than the L2 cache holds
CALLS = 8  # a graph
ROUNDS = 40
STREAM = 1


@dataclass(frozen=True)
class Case:
    """One operand of a recipe, and what making it moves.

    kind: "row", "col", "both" (of a bf16 matrix), "requantize" (of codes in `source`, along cols)
    """

    kind: str
    scheme: str
    transform: str
    source: str = "bf16"

    def bytes(self) -> float:
        """An element: read and written by all launches."""
        spec = get_scheme(self.scheme)
        read = 2.0 if self.source == "bf16" else 0.5 + 1 / get_scheme(self.source).width
        directions = 2 if self.kind == "both" else 1
        if spec.widened:
            return read + directions * (2 + 4 / 16)  # numbers, worths
        if spec.global_scale == "exact" and spec.rounding != "ms_eden":
            return 2 * read + directions * (0.5 + 1 / 16)
        if spec.format == "mxfp4":
            return read + directions * (0.5 + 1 / 32)
        return read + directions * (0.5 + 4 / 16 + 5 / 16)  # worths written, read, made scales of


EDEN, SR = "nvfp4_ms_eden_pow2", "nvfp4_sr_pow2"
CASES = {
    # quartet2
    "rht_quantize_row": Case("row", EDEN, "rht128"),
    "rht_quantize_col": Case("col", EDEN, "rht128"),
    "rht_quantize_both": Case("both", EDEN, "rht128"),
    "requantize": Case("requantize", EDEN, "rht128", "nvfp4_46_pow2"),
    # as the emulated GEMM reads them
    "rht_quantize_both_bf16": Case("both", EDEN + WIDENED, "rht128"),
    "requantize_bf16": Case("requantize", EDEN + WIDENED, "rht128", "nvfp4_46_pow2"),
    # the other recipes
    "tetrajet2_both": Case("both", SR, "rht128"),
    "tetrajet2_requantize": Case("requantize", SR, "rht128", "nvfp4_pow2"),
    "tetrajet2_exact_both": Case("both", "nvfp4_sr", "rht128"),
    "nvfp4_dgrad_row": Case("row", SR, "none"),
    "nvfp4_wgrad_col": Case("col", SR, "rht16"),
    "nvfp4_wgrad_x_col": Case("col", "nvfp4_pow2", "rht16"),
    "mxfp4_both": Case("both", "mxfp4_sr", "rht64"),
    "mxfp4_col": Case("col", "mxfp4_sr", "rht64"),
    "quartet_both": Case("both", "mxfp4_rtn34", "rht32"),
    "quartet_requantize": Case("requantize", "mxfp4_rtn34", "rht32", "mxfp4_rtn"),
}
DEQUANTIZED, SQUARE = "nvfp4_46_pow2", "nvfp4_16x16_pow2"
BYTES = {
    "copy": 4.0,
    "dequantize": 0.5625 + 2,
    "transpose": 0.5 + 1 / 256 + 0.5 + 1 / 16,  # a scale for each row is written
} | {n: c.bytes() for n, c in CASES.items()}


def cases(rows: int, cols: int) -> dict[str, list[Callable[[], object]]]:
    """name -> one call for each of the inputs."""
    device = torch.device("cuda", torch.cuda.current_device())
    xs = [torch.randn(rows, cols, device=device).bfloat16() for _ in range(INPUTS)]
    target = torch.empty_like(xs[0])
    seeds = [torch.tensor(s, device=device) for s in (1, 2)]
    sources = {case.source for case in CASES.values()} - {"bf16"}
    packed = {s: [torch.ops.q2.quantize(x, None, None, s, 0) for x in xs] for s in sources}

    def call(case: Case, i: int):
        scheme, transform = case.scheme, case.transform
        if case.kind == "requantize":
            operand = packed[case.source][i]
            args = (seeds[1], case.source, scheme, transform, cols, STREAM)
            return lambda: rotating_ops.requantize(*operand, *args)
        x = xs[i]
        if case.kind == "both":
            return lambda: rotating_ops.rht_quantize_both(x, *seeds, scheme, transform, STREAM)
        if transform == "none":
            return lambda: rotating_ops.quantize(x, None, seeds[0], scheme, STREAM)
        transpose = case.kind == "col"
        return lambda: rotating_ops.rht_quantize(x, seeds[0], scheme, transform, transpose, STREAM)

    def widen(i: int):
        operand = packed[DEQUANTIZED][i]
        return lambda: dequantize(*operand, DEQUANTIZED, cols, torch.bfloat16)

    def turn(x: torch.Tensor):
        codes, scales, _ = torch.ops.q2.quantize(x, None, None, SQUARE, 0)
        return lambda: transpose(codes, scales, SQUARE, cols, True)

    calls: dict[str, list[Callable[[], object]]] = {
        "transpose": [turn(x) for x in xs],
        "copy": [partial(target.copy_, x) for x in xs],
        "dequantize": [widen(i) for i in range(INPUTS)],
    }
    return calls | {n: [call(c, i) for i in range(INPUTS)] for n, c in CASES.items()}


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


def host_microseconds(call: Callable[[], object], count: int = 400) -> float:
    """What a call costs the host, with the device never in its way. Median of 5."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def host_calls() -> dict[str, Callable[[], object]]:
    """What the host is timed at: one launch alone, whole ops through torch's dispatcher, and a
    copy for comparison, on a small matrix."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(256, 256, device=device).bfloat16()
    y, seed = torch.empty_like(x), torch.tensor(1, device=device)
    packed = torch.ops.q2.quantize(x, None, None, DEQUANTIZED, 0)
    field = At(0)
    values = (field, field, 0, 0, 0, 1, 0)
    bound = swizzle_launch().bind(device.index, (1, 1), values, {field: 0})
    stream, at = torch.cuda.current_stream().cuda_stream, packed[1].data_ptr()
    return {
        "host_launch": lambda: bound(stream, (at,)),
        "host_copy": lambda: torch.ops.aten.copy_(y, x),
        "host_rht_quantize": lambda: torch.ops.q2.rht_quantize(x, seed, EDEN, "rht128", False, 0),
        "host_rht_quantize_both": lambda: torch.ops.q2.rht_quantize_both(
            x, seed, seed, EDEN, "rht128", 0
        ),
        "host_requantize": lambda: torch.ops.q2.requantize(
            *packed, seed, DEQUANTIZED, EDEN, "rht128", 256, 1
        ),
        "host_dequantize": lambda: torch.ops.q2.dequantize(
            *packed, DEQUANTIZED, 256, torch.bfloat16
        ),
    }


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
            f"{name:22} {rows}x{cols:<6} {micro:8.1f} us {ratio:6.2f} copies "
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
    for name, call in host_calls().items():
        micro = host_microseconds(call)
        results.append(
            {"name": name, "shape": [256, 256], "ratio": round(micro, 2)}
            | {"unit": "host microseconds a call", **about}
        )
        print(f"{name:22} {micro:8.1f} us of the host a call")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
