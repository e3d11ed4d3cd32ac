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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.cost_model.quantisers import BF16, HIGH, Quantiser, packed_bits
from q2compile.runtime_kernels.cuda.calls import At
from q2compile.runtime_kernels.cuda.dequantize import dequantize
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import rotating_ops
from q2compile.runtime_kernels.cuda.quantize.quantize_masked import quantize_masked
from q2compile.runtime_kernels.numerics.schemes import WIDENED
from q2compile.tools.bench.timing import captured, host_microseconds, time_in_turns

assert runtime_kernels  # importing it registers the ops
OUT = Path(__file__).parent / "results" / "kernels.json"
INPUTS = 4  # 4 x 64 MiB at least: more than the L2 cache holds
STREAM = 1


EDEN, SR = "nvfp4_ms_eden_pow2", "nvfp4_sr_pow2"
CASES = {
    # quartet2
    "rht_quantize_row": Quantiser("row", EDEN, "rht128"),
    "rht_quantize_col": Quantiser("col", EDEN, "rht128"),
    "rht_quantize_both": Quantiser("both", EDEN, "rht128"),
    "requantize": Quantiser("requantize", EDEN, "rht128", "nvfp4_46_pow2"),
    # as the emulated GEMM reads them
    "rht_quantize_both_bf16": Quantiser("both", EDEN + WIDENED, "rht128"),
    "requantize_bf16": Quantiser("requantize", EDEN + WIDENED, "rht128", "nvfp4_46_pow2"),
    # the other recipes
    "tetrajet2_both": Quantiser("both", SR, "rht128"),
    "tetrajet2_requantize": Quantiser("requantize", SR, "rht128", "nvfp4_pow2"),
    "tetrajet2_exact_both": Quantiser("both", "nvfp4_sr", "rht128"),
    "nvfp4_dgrad_row": Quantiser("row", SR),
    "nvfp4_wgrad_col": Quantiser("col", SR, "rht16"),
    "nvfp4_wgrad_x_col": Quantiser("col", "nvfp4_pow2", "rht16"),
    "mxfp4_both": Quantiser("both", "mxfp4_sr", "rht64"),
    "mxfp4_col": Quantiser("col", "mxfp4_sr", "rht64"),
    "quartet_both": Quantiser("both", "mxfp4_rtn34", "rht32"),
    "quartet_requantize": Quantiser("requantize", "mxfp4_rtn34", "rht32", "mxfp4_rtn"),
    # forwards
    "quantize_46": Quantiser("row", "nvfp4_46_pow2"),
    "quantize_rtn": Quantiser("row", "nvfp4_pow2"),
    "quartet_forward": Quantiser("row", "mxfp4_quest", "h32"),
    # as the emulated GEMM reads those of the other recipes
    "tetrajet2_both_bf16": Quantiser("both", SR + WIDENED, "rht128"),
    "tetrajet2_requantize_bf16": Quantiser("requantize", SR + WIDENED, "rht128", "nvfp4_pow2"),
    "nvfp4_dgrad_row_bf16": Quantiser("row", SR + WIDENED),
    "nvfp4_wgrad_col_bf16": Quantiser("col", SR + WIDENED, "rht16"),
    "mxfp4_both_bf16": Quantiser("both", "mxfp4_sr" + WIDENED, "rht64"),
    "mxfp4_col_bf16": Quantiser("col", "mxfp4_sr" + WIDENED, "rht64"),
    "quartet_both_bf16": Quantiser("both", "mxfp4_rtn34" + WIDENED, "rht32"),
    "quartet_requantize_bf16": Quantiser(
        "requantize", "mxfp4_rtn34" + WIDENED, "rht32", "mxfp4_rtn"
    ),
}
DEQUANTIZED = "nvfp4_46_pow2"
BYTES = {"copy": 4.0, "dequantize": float(packed_bits(DEQUANTIZED) + HIGH) / 8}
BYTES |= {name: float(case.amax_bits + case.bits) / 8 for name, case in CASES.items()}


def cases(rows: int, cols: int) -> dict[str, list[Callable[[], object]]]:
    """name -> one call for each of the inputs."""
    device = torch.device("cuda", torch.cuda.current_device())
    xs = [torch.randn(rows, cols, device=device).bfloat16() for _ in range(INPUTS)]
    target = torch.empty_like(xs[0])
    seeds = [torch.tensor(s, device=device) for s in (1, 2)]
    sources = {case.source for case in CASES.values()} - {BF16}
    packed = {s: [torch.ops.q2.quantize(x, None, None, s, 0) for x in xs] for s in sources}

    def call(case: Quantiser, i: int):
        scheme, transform = case.scheme, case.transform
        if case.kind == "requantize":
            operand = packed[case.source][i]
            args = (seeds[1], case.source, scheme, transform, cols, STREAM)
            return lambda: rotating_ops.requantize(*operand, *args)
        x = xs[i]
        if case.kind == "both":
            return lambda: rotating_ops.rht_quantize_both(x, *seeds, scheme, transform, STREAM)
        if case.spec.masked:
            return lambda: quantize_masked(x, scheme, transform)
        if transform == "none":
            seed = seeds[0] if case.spec.stochastic else None
            return lambda: rotating_ops.quantize(x, None, seed, scheme, STREAM)
        transpose = case.kind == "col"
        return lambda: rotating_ops.rht_quantize(x, seeds[0], scheme, transform, transpose, STREAM)

    def widen(i: int):
        operand = packed[DEQUANTIZED][i]
        return lambda: dequantize(*operand, DEQUANTIZED, cols, torch.bfloat16)

    calls: dict[str, list[Callable[[], object]]] = {
        "copy": [partial(target.copy_, x) for x in xs],
        "dequantize": [widen(i) for i in range(INPUTS)],
    }
    return calls | {n: [call(c, i) for i in range(INPUTS)] for n, c in CASES.items()}


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


def write(path: Path, results: list[dict[str, Any]]) -> None:
    """Puts rows into a file of results, each in place of the one of its name and shape."""
    known = json.loads(path.read_text()) if path.exists() else []
    rows = {(row["name"], *row.get("shape", ())): row for row in (*known, *results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def measure(rows: int, cols: int, about: dict, only: set[str]) -> list[dict]:
    """One row of the result for each kernel at this shape; all, or those named and the copy."""
    calls_of = cases(rows, cols)
    chosen = {n: calls for n, calls in calls_of.items() if not only or n in {*only, "copy"}}
    times = time_in_turns({name: captured(calls) for name, calls in chosen.items()})
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
    for name, call in {} if args.only else host_calls().items():
        micro = host_microseconds(call)
        results.append(
            {"name": name, "shape": [256, 256], "ratio": round(micro, 2)}
            | {"unit": "host microseconds a call", **about}
        )
        print(f"{name:22} {micro:8.1f} us of the host a call")
    write(args.out, results)


if __name__ == "__main__":
    main()
