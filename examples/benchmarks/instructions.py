"""Counts the instructions an element costs, from the machine code, and what that predicts.

    python examples/benchmarks/instructions.py [--out FILE]

Needs no GPU: the kernels are compiled for each architecture and disassembled, and the loop over
tiles of the launch that makes the codes is counted. The predicted time is the larger of two floors:
its instructions over the issue rate (at the share of issue slots that MS-EDEN's kernels were
measured to fill on an H200; stochastic rounding, whose 64-bit products take two slots, fills 0.63),
and the bytes of all launches over the memory's bandwidth. Only the H200's line can be compared with
a measurement so far; clocks and bandwidths of the others are their data sheets'.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels import CASES, Case

from q2compile.runtime_kernels.cuda.jit import disassemble, nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, rotate_launch
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

OUT = Path(__file__).parent / "results" / "kernel_instructions.json"
ELEMENTS_A_THREAD = 64  # of each direction, in one pass of the loop
SHAPE = (8192, 4096)
# Instructions issued a cycle and scheduler while a multiprocessor was busy (ncu, KERNEL_LOG.md).
ISSUE_SHARE = 0.75


@dataclass(frozen=True)
class Gpu:
    """Four schedulers a multiprocessor, each of which issues to 32 lanes once a cycle."""

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    gigabytes_per_s: float


GPUS = [
    Gpu("H200", "sm_90a", 132, 1.95, 4200),  # clock and copy bandwidth as measured
    Gpu("B200", "sm_100a", 148, 1.85, 8000),
    Gpu("RTX 5090", "sm_120a", 170, 2.41, 1792),
]
# Where coins are so close to a fraction that all its bits count, it is converted to an integer.
RARE = "F2I"
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}


def main_launch(case: Case) -> Launch:
    """The launch of a case that makes the codes."""
    scheme = None if case.source == "bf16" else get_scheme(case.source)
    source = SOURCES[scheme.format if scheme else torch.bfloat16]
    directions = DIRECTIONS["col" if case.kind == "requantize" else case.kind]
    return rotate_launch(
        source, get_transform(case.transform), get_scheme(case.scheme), *directions
    )


def count(name: str, architecture: str) -> tuple[float, dict[str, float]]:
    """Instructions an element: all, and of the commonest kinds."""
    variant = main_launch(CASES[name]).variant
    loop = disassemble.disassemble(nvrtc.cubin(variant, architecture)).hot_loop(RARE)
    common = {kind: round(n / ELEMENTS_A_THREAD, 2) for kind, n in loop.most_common(8)}
    return sum(loop.values()) / ELEMENTS_A_THREAD, common


def predict(instructions: float, bytes_: float, gpu: Gpu) -> tuple[float, str]:
    """Microseconds at SHAPE, and what bounds them."""
    elements = SHAPE[0] * SHAPE[1]
    per_microsecond = gpu.multiprocessors * 4 * 32 * gpu.gigahertz * 1e3 * ISSUE_SHARE
    issue, memory = (
        elements * instructions / per_microsecond,
        elements * bytes_ / gpu.gigabytes_per_s / 1e3,
    )
    return (issue, "issue") if issue > memory else (memory, "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    major, minor = nvrtc.version()
    rows = []
    for name, case in CASES.items():
        bytes_ = case.bytes()
        for gpu in GPUS:
            instructions, common = count(name, gpu.architecture)
            microseconds, bound = predict(instructions, bytes_, gpu)
            rows.append(
                {
                    "name": name,
                    "architecture": gpu.architecture,
                    "instructions_per_element": round(instructions, 2),
                    "commonest": common,
                    "gpu": gpu.name,
                    "shape": SHAPE,
                    "predicted_microseconds": round(microseconds, 1),
                    "bound": bound,
                    "nvrtc": f"{major}.{minor}",
                    "date": datetime.date.today().isoformat(),
                    "command": "python examples/benchmarks/instructions.py",
                }
            )
            print(
                f"{name:21} {gpu.architecture:8} {instructions:6.1f} instructions an element  "
                f"{gpu.name:9} {microseconds:6.1f} us, bound by {bound}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
