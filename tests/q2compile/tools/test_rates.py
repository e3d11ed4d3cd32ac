# SPDX-License-Identifier: Apache-2.0
"""The rates of instructions that `q2compile bench` measures first: their machine code, and on a GPU
their numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from q2compile.cost_model import rates as table
from q2compile.cost_model.ranges import Range
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.tools.bench.bench import Bench
from q2compile.tools.bench.rates import INSTRUCTIONS, instructions, rate_launch, rates
from q2compile.tools.bench.report import UNSUPPORTED, text
from tests.support import disassemble

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_loop_has_256_of_its_instruction_and_nothing_else_that_counts(name) -> None:
    """ptxas makes some additions of halves multiply-adds, which is one row all the same."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    same = {"HADD2": ("HADD2", "HFMA2")}.get(name, (name.partition(".")[0],))
    for target in (t for t in ARCHITECTURES if name in instructions(t)):
        code = disassemble.disassemble(nvrtc.cubin(rate_launch(name).variant, target))
        ((first, last),) = code.loops
        found = Counter(one.partition(".")[0] for one in code.names[first : last + 1])
        assert sum(found[one] for one in same) == 256, (target, found)
        assert sum(found.values()) - 256 <= 16, (target, found)


def test_which_instructions_an_architecture_has() -> None:
    assert {name: name in instructions("sm_90a") for name in ("FFMA2", "F2FP.E2M1")} == {
        "FFMA2": False,
        "F2FP.E2M1": False,
    }
    assert set(instructions("sm_100a")) == set(INSTRUCTIONS)
    assert set(INSTRUCTIONS) - set(instructions("sm_120a")) == {"FFMA2"}


def test_the_cost_model_says_which_are_measured(monkeypatch) -> None:
    assert table.lanes("F2FP.E2M1", "sm_100a") == (Range(64, 64), False)
    monkeypatch.setitem(table.MEASURED, ("sm_100a", "F2FP.E2M1"), 32.0)
    assert table.lanes("F2FP.E2M1", "sm_100a") == (Range(32, 32), True)
    assert table.lanes("F2FP.E4M3", "sm_100a") == (Range(64, 64), False)


def test_a_cpu_has_no_rates() -> None:
    (row,) = rates(Bench.of(torch.device("cpu"), group="rates"))
    assert (row.status, row.why) == (UNSUPPORTED, "no CUDA device")


@pytest.mark.gpu
def test_rates_of_a_gpu() -> None:
    """The Programming Guide has the numbers of these four; 2% for the loop and its start. No
    instruction has more lanes than are issued."""
    rows = {row.name: row for row in rates(Bench.of(torch.device("cuda", 0), group="rates"))}
    found = {name: row.more["lanes"] for name, row in rows.items()}
    print(*(text(row.as_line()) for row in rows.values()), sep="\n")
    known = {"FFMA": 128, "LOP3": 64, "MUFU": 16, "SHFL": 32}
    assert {name: found[name] for name in known} == pytest.approx(known, rel=0.02)
    assert all(8 < lanes <= 1.01 * table.ISSUED for lanes in found.values())
