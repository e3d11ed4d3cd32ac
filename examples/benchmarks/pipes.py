# SPDX-License-Identifier: Apache-2.0
"""How full a quantizer keeps the pipes of a multiprocessor, beside what its machine code says.

    python examples/benchmarks/pipes.py [--cases NAME,...]

On one GPU that the cost model knows, at 8192 x 4096. Of each call it writes the share of the issue
slots that its instructions fill (`ratio`), and the share of the cycles of each pipe (`derived`), by
the counts of `predicted.py --count` and the measured time without the constant time of launches. If
Nsight Compute is installed and may read counters (`ncu`), `ncu` has its counters of the longest
kernel, and why not otherwise. The last line is the fit: the issue share at the median, and from
the 10th to the 90th percentile, of the calls that arithmetic limits (ISSUE_SHARE of
q2compile/cost_model/devices.py).
"""

from __future__ import annotations

import csv
import re
import shutil
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator

import torch
from quantizers import COLUMNS, ROWS
from rows import Benchmark, Row, run
from workloads import GPU, INPUTS

from q2compile.cost_model.devices import LAUNCH_SECONDS, MEMORY_SHARE, present_device
from q2compile.tools.bench.cases import CASES, calls_of_quantizers
from q2compile.tools.bench.timing import captured, time_in_turns

_SECTIONS = ("ComputeWorkloadAnalysis", "SpeedOfLight", "SchedulerStats")
_SHOWN = re.compile(  # shares of peak while a multiprocessor is active
    r"^(sm__inst_executed_pipe_\w+|smsp__issue_active)\.avg\.pct(_of_peak_sustained_active)?$"
    r"|^gpu__time_duration\.sum$"
)
_MARK = "elementwise"  # in the name of torch's kernel ahead of each call
_SECONDS = 600


def pipes(args: Namespace) -> Iterator[Row]:
    device = present_device()
    if device is None:
        sys.exit(f"{torch.cuda.get_device_name()}: not in q2compile/cost_model/devices.py")
    names = args.cases.split(",") if args.cases else list(CASES)
    calls = calls_of_quantizers(GPU, ROWS, COLUMNS, INPUTS, names)
    times = time_in_turns({name: captured(make()) for name, make in calls.items()})
    counters = read_counters(names)
    shares: dict[bool, list[float]] = {False: [], True: []}
    for name in names:
        case, micro = CASES[name], statistics.median(times[name])
        seconds = 1e-6 * micro - case.launches * LAUNCH_SECONDS.middle
        per_element = device.issue * seconds / (ROWS * COLUMNS)
        share = case.instructions(device.architecture) / per_element
        cycles = case.pipe_cycles(device.architecture)
        in_memory = float(case.bits) / 8 * ROWS * COLUMNS / (device.bandwidth * MEMORY_SHARE.middle)
        is_limited = in_memory < 0.9 * seconds and not case.amax_bits
        shares[case.spec.rounding == "sr"] += [share] * is_limited
        yield {
            "name": f"pipes_{name}",
            "shape": [ROWS, COLUMNS],
            "ratio": round(share, 3),
            "unit": "of the issue slots",
            "microseconds": round(micro, 2),
            "limited_by_arithmetic": is_limited,
            "derived": {pipe: round(each.low / per_element, 3) for pipe, each in cycles.items()},
            "ncu": counters.get(name, counters.get("", {})),
        }
    for draws, found in shares.items():
        if len(found) > 1:
            low, *_, high = statistics.quantiles(found, n=10)
            middle = statistics.median(found)
            of = "with" if draws else "without"
            print(f"issue share {of} random bits: {middle:.3f}, {low:.3f} to {high:.3f}")


def read_counters(names: list[str]) -> dict[str, Row]:
    """Case -> ncu's counters of its longest kernel; "" -> why there are none."""
    if shutil.which("ncu") is None:
        return {"": {"why": "ncu is not installed"}}
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none"]
    command += ["--profile-from-start", "off", *(f"--section={name}" for name in _SECTIONS)]
    command += [sys.executable, __file__, "--launch", ",".join(names)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"": {"why": f"ncu took more than {_SECONDS} s"}}
    found = list(counters_of(done.stdout.splitlines()))
    if len(found) != len(names):
        return {"": {"why": (done.stdout + done.stderr)[-500:]}}
    return dict(zip(names, found, strict=True))


def counters_of(lines: Iterable[str]) -> Iterator[Row]:
    """The counters of the longest kernel of each call, from what ncu prints."""
    table = [line for line in lines if line.startswith('"')]
    kernels = list(csv.DictReader(table))[1:]  # the first line has the units
    calls: list[list[Row]] = []
    for kernel in kernels:
        if _MARK in kernel["Kernel Name"]:
            calls.append([])
            continue
        numbers = {name: text.replace(",", "") for name, text in kernel.items() if text}
        shown = {name: text for name, text in numbers.items() if _SHOWN.search(name)}
        of_kernel = {name: float(text) for name, text in shown.items() if _is_number(text)}
        calls[-1].append({"kernel": kernel["Kernel Name"][:60], **of_kernel})
    for call in calls:
        yield max(call, key=lambda kernel: kernel.get("gpu__time_duration.sum", 0.0))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", text) is not None


def launch_each(names: list[str]) -> None:
    """Runs each case once, after a mark, for ncu to see."""
    mark = torch.zeros(1, device=GPU)
    made = calls_of_quantizers(GPU, ROWS, COLUMNS, 1, names)
    calls = [make()[0] for make in made.values()]
    mark.add_(1)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        mark.add_(1)
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--cases", default="", help="of " + ", ".join(CASES) + "; all without")
    if sys.argv[1:2] == ["--launch"]:
        launch_each(sys.argv[2].split(","))
        return
    run("pipes", __doc__, {"pipes": Benchmark(pipes, "pipes.json", ("cases",))}, parser)


if __name__ == "__main__":
    main()
