# SPDX-License-Identifier: Apache-2.0
"""The first group of `q2compile bench`: how many lanes of an instruction a multiprocessor executes
in a cycle, which the cost model assumes where it is not measured (cost_model/rates.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from q2compile.cost_model.rates import lanes
from q2compile.runtime_kernels.cuda.jit.launch import Launch, architecture, launch, multiprocessors
from q2compile.tools.bench.bench import Bench, failed
from q2compile.tools.bench.report import UNSUPPORTED, BenchRow

_THREADS, _OPERATIONS, _ROUNDS, _REPEATS = 1024, 256, 500, 5
# By their number in rates.cu.
INSTRUCTIONS = (
    *("FFMA", "FFMA2", "F2FP.E2M1", "F2FP.E4M3", "HADD2", "HFMA2", "SHFL", "MUFU", "LOP3"),
    "IADD3",
)
_FROM = {"F2FP.E4M3": 89, "FFMA2": 100, "F2FP.E2M1": 100}


def instructions(target: str) -> list[str]:
    """The instructions that an architecture like sm_90a has. 12.x has no packed fp32."""
    capability = int(target.partition("_")[2].rstrip("af"))
    return [
        name
        for name in INSTRUCTIONS
        if capability >= _FROM.get(name, 0) and not (name == "FFMA2" and capability >= 120)
    ]


def rate_launch(name: str) -> Launch:
    number = {"Q2_RATE": INSTRUCTIONS.index(name)}
    return launch(str(Path(__file__).with_name("rates.cu")), "PPii", _THREADS, defines=number)


def rates(bench: Bench) -> Iterator[BenchRow]:
    """One row for each instruction: what was measured, and what the cost model assumes."""
    if not bench.on_gpu:
        yield BenchRow("rates", "all", status=UNSUPPORTED, why="no CUDA device")
        return
    index = torch.cuda.current_device() if bench.device.index is None else bench.device.index
    target = architecture(index)
    for name in instructions(target):
        bench.begun(name)
        row = BenchRow("rates", name)
        try:
            found = measure(name, index)
            known, measured = lanes(name, target)
            how = "measured before" if measured else "assumed"
            row.why = (
                f"{found:.1f} lanes per multiprocessor and cycle; {known.text('.1f')} were {how}"
            )
            row.more = {"architecture": target, "lanes": round(found, 2)}
            row.more |= {"cost_model": known.low, "cost_model_high": known.high}
        except Exception as error:  # the others are measured
            failed(row, error)
        yield row


def measure(name: str, index: int) -> float:
    """Lanes of an instruction per multiprocessor and cycle: of some launches the fastest, by the
    median of its thread blocks."""
    blocks = multiprocessors(index)
    cycles = torch.zeros(blocks + 1, dtype=torch.int64, device=torch.device("cuda", index))
    addresses = [cycles.data_ptr(), cycles[-1:].data_ptr()]
    slots = {"cycles": 0, "result": 1}
    bound = rate_launch(name).bind(index, (blocks, 1), ("cycles", "result", _ROUNDS, 7), slots)
    found = []
    for _ in range(_REPEATS):
        bound(torch.cuda.current_stream(index).cuda_stream, addresses)
        found.append(float(cycles[:-1].double().median()))
    return _THREADS * _OPERATIONS * _ROUNDS / min(found)
