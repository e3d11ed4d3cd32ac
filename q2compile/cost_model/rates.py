# SPDX-License-Identifier: Apache-2.0
"""How many lanes of an instruction a multiprocessor executes in a cycle. `q2compile bench` measures
them first (group `rates`), and the pipes of quantizers are filled by them (`quantizers`)."""

from __future__ import annotations

from typing import NamedTuple

from q2compile.cost_model.ranges import Range

ISSUED = 128  # lanes of one instruction in a cycle: four issue slots


class Pipe(NamedTuple):
    """Instructions of one rate.

    name: of the pipe that they share with other rows
    measured: the instruction of `q2compile bench` that stands for them
    lanes: per cycle
    """

    name: str
    measured: str
    lanes: Range
    instructions: str


# Results a clock on 9.0 by the CUDA C++ Programming Guide 13.0 (August 2025), "Arithmetic
# Instructions", of which an H200 reached 96 to 100% (bench, 2026-11-29). On 10.x ptxas 13.0
# schedules packed fp32 at two cycles; whether the pipe needs them is not known. Halves are counted
# in the pipe of fp32, which they may not share.
PIPES = (
    Pipe("fma", "FFMA", Range(128, 128), "FFMA FADD FMUL IMAD HADD2 HMUL2 HFMA2"),
    Pipe("fma", "FFMA2", Range(64, 128), "FFMA2 FADD2 FMUL2 FHFMA FHADD"),
    Pipe(
        "alu",
        "LOP3",
        Range(64, 64),
        "FMNMX FMNMX3 LOP3 SHF IADD3 IADD LEA SEL FSEL PRMT FSETP ISETP VIMNMX VIMNMX3",
    ),
    Pipe("conversion", "F2FP.E2M1", Range(64, 64), "F2FP I2FP"),
    Pipe("mufu", "MUFU", Range(16, 16), "MUFU I2F F2I"),
    Pipe("shared", "SHFL", Range(32, 32), "LDS STS LDSM SHFL"),
)
# (architecture, instruction) -> lanes, from a report's group `rates`.
MEASURED: dict[tuple[str, str], float] = {}


def lanes(instruction: str, architecture: str) -> tuple[Range, bool]:
    """Per cycle and multiprocessor, and whether that was measured. instruction: F2FP.E2M1 or
    F2FP."""
    measured = MEASURED.get((architecture, instruction))
    if measured is not None:
        return Range(measured, measured), True
    name = instruction.partition(".")[0]
    return next(pipe.lanes for pipe in PIPES if name in pipe.instructions.split()), False
