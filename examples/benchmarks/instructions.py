# SPDX-License-Identifier: Apache-2.0
"""Counts instructions per element in machine code, the input of the cost model
(q2compile/cost_model). `predicted.py --count` calls it.

Needs NVRTC and no GPU: the kernels are compiled for each architecture and disassembled. The loop
over tiles of the launch that makes the codes is counted."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch

from q2compile.cost_model.devices import DATA_SHEETS
from q2compile.cost_model.quantizers import BF16, ROWS_UNROTATED, Quantizer
from q2compile.cost_model.rates import PIPES
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    RotatingKernel,
    rotate_launch,
)
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.tools.bench.cases import CASES

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support import disassemble

COUNTED = Path(__file__).parents[2] / "q2compile" / "cost_model" / "instructions.json"
ELEMENTS_A_THREAD = 64  # of each direction, in one pass of the loop
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
DIRECTIONS[ROWS_UNROTATED] = DIRECTIONS["both"]


def main_launch(case: Quantizer) -> Launch:
    """The launch of a case that makes the codes."""
    scheme = None if case.source == BF16 else get_scheme(case.source)
    source = SOURCES[scheme.format if scheme else torch.bfloat16]
    directions = DIRECTIONS["col" if case.kind == "requantize" else case.kind]
    how = get_transform(case.transform), case.spec, *directions
    kernel = RotatingKernel(source, *how, rotates_rows=case.kind != ROWS_UNROTATED)
    return rotate_launch(kernel)


def count(case: Quantizer, architecture: str) -> tuple[float, list[float]]:
    """Instructions per element: all, and those of each row of PIPES."""
    variant = main_launch(case).variant
    loop = disassemble.disassemble(nvrtc.cubin(variant, architecture)).hot_loop()
    counts = (
        sum(loop.values()),
        *(sum(loop[name] for name in pipe.instructions.split()) for pipe in PIPES),
    )
    instructions, *pipes = (round(n / ELEMENTS_A_THREAD, 2) for n in counts)
    return instructions, pipes


def write() -> None:
    """Count all cases, and write them to `COUNTED`."""
    major, minor = nvrtc.version()
    architectures = sorted({device.architecture for device in DATA_SHEETS})
    counts: list[dict[str, Any]] = []
    for case in CASES.values():
        key: dict[str, Any] = {
            name: getattr(case, name) for name in ("kind", "scheme", "transform")
        }
        key["source"] = case.source if case.source == BF16 else get_scheme(case.source).format
        found = {a: count(case, a) for a in architectures}
        for i, name in enumerate(("instructions", "pipes")):
            key[name] = {a: each[i] for a, each in found.items()}
        counts.append(key)
    result = {
        "what": "instructions per element of rotate_quantize.cu's loop over tiles: all, and those "
        "of each row of PIPES (rates.py)",
        "nvrtc": f"{major}.{minor}",
        "date": datetime.date.today().isoformat(),
        "command": "python examples/benchmarks/predicted.py --count",
        "counts": [],
    }
    rows = ",\n".join(f"  {json.dumps(row)}" for row in counts)
    text = json.dumps(result, indent=1).replace('"counts": []', f'"counts": [\n{rows}\n ]')
    COUNTED.write_text(text + "\n")
