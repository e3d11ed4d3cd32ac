# SPDX-License-Identifier: Apache-2.0
"""How many lanes of an instruction a multiprocessor executes in a cycle. `q2compile bench` measures
them first (group `rates`); `examples/benchmarks/instructions.py` counts the cycles of pipes by
them."""

from __future__ import annotations

from typing import NamedTuple

ISSUED = 128  # lanes of one instruction in a cycle: four issue slots


class Pipe(NamedTuple):
    """lanes: per cycle, at least where it is not known."""

    name: str
    lanes: int
    instructions: str


# ptxas schedules packed fp32 at two cycles on 10.x. Whether arithmetic of mixed precision takes one
# or two, and whether halves share the pipe of fp32, is not known. The others have 64, 64, 16 and 32
# results a clock on 9.0 by the CUDA C++ Programming Guide 13.0, "Arithmetic Instructions"; an H200
# reached 96 to 100% of each (bench, 2026-11-29).
PIPES = (
    Pipe("fma", 128, "FFMA FADD FMUL IMAD HADD2 HMUL2 HFMA2"),
    Pipe("fma", 64, "FFMA2 FADD2 FMUL2 FHFMA FHADD"),
    Pipe(
        "alu",
        64,
        "FMNMX FMNMX3 LOP3 SHF IADD3 IADD LEA SEL FSEL PRMT FSETP ISETP VIMNMX VIMNMX3",
    ),
    Pipe("conversion", 64, "F2FP I2FP"),
    Pipe("mufu", 16, "MUFU I2F F2I"),
    Pipe("shared", 32, "LDS STS LDSM SHFL"),
)
# (architecture, instruction) -> lanes, from a report's group `rates`; the others are assumed.
MEASURED: dict[tuple[str, str], float] = {}


def lanes(instruction: str, architecture: str) -> tuple[float, bool]:
    """Per cycle and multiprocessor, and whether that was measured. instruction: F2FP.E2M1 or
    F2FP."""
    measured = MEASURED.get((architecture, instruction))
    if measured is not None:
        return measured, True
    name = instruction.partition(".")[0]
    return next(float(pipe.lanes) for pipe in PIPES if name in pipe.instructions.split()), False
