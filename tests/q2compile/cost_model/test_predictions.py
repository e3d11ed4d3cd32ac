# SPDX-License-Identifier: Apache-2.0
"""The cost model's predictions of the rows that were measured on an H200
(examples/benchmarks/results). A change that makes the model worse fails here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from q2compile.cost_model import devices
from q2compile.cost_model.quantizers import counted
from q2compile.cost_model.rates import PIPES

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
# The one row outside of its aim: the model leaves out host time of buffers and of saved tensors.
MISSED = {"host_us_per_linear"}
# Both at one shape: measured before the kernels took fewer instructions, and 14% and 15% low then.
MISSED_KERNELS = {
    "nvfp4_x_both 16384x8192",
    "nvfp4_dgrad_row 8192x4096",
}


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import predicted
    finally:
        sys.path.remove(str(BENCHMARKS))
    return predicted


def test_kernels_are_predicted_within_their_aim(predicted) -> None:
    rows = list(predicted.kernels())
    outside = {row.name: row.error for row in rows if abs(row.error) > row.target}
    assert set(outside) == MISSED_KERNELS, outside
    within = [row.error for row in rows if row.name not in MISSED_KERNELS]
    assert abs(sum(within) / len(within)) < 0.02  # no bias beyond that


def test_layers_and_steps_are_predicted_within_their_aim(predicted) -> None:
    rows = (*predicted.linears(), *predicted.steps(), *predicted.of_the_host())
    outside = {row.name: row.error for row in rows if abs(row.error) > row.target}
    assert set(outside) == MISSED, outside


def test_the_page_is_what_the_model_says(predicted) -> None:
    """examples/benchmarks/PREDICTED.md is written by examples/benchmarks/predicted.py."""
    assert predicted.PAGE_FILE.read_text(encoding="utf-8") == predicted.page()


NCU = """\
==PROF== Profiling
"ID","Kernel Name","gpu__time_duration.sum","sm__inst_executed_pipe_alu.avg.pct","launch__waves"
"","","us","%",""
"0","vectorized_elementwise_kernel","1.5","",""
"1","q2_rotate","1,070.2","41.5","3"
"2","q2_scales","4.4","2.0","1"
"3","vectorized_elementwise_kernel","1.5","",""
"4","q2_rotate","33.1","n/a","3"
"""


def test_counters_are_those_of_the_longest_kernel_of_each_call(monkeypatch) -> None:
    """Each call follows a kernel of torch's. A counter that is not there is left out."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pipes

    alu = "sm__inst_executed_pipe_alu.avg.pct"
    assert list(pipes.counters_of(NCU.splitlines())) == [
        {"kernel": "q2_rotate", "gpu__time_duration.sum": 1070.2, alu: 41.5},
        {"kernel": "q2_rotate", "gpu__time_duration.sum": 33.1},
    ]


def test_every_case_is_counted_for_every_architecture(predicted) -> None:
    architectures = {device.architecture for device in devices.DATA_SHEETS}
    for row in counted().values():
        assert set(row["instructions"]) == set(row["pipes"]) == architectures
        assert all(len(pipes) == len(PIPES) for pipes in row["pipes"].values())
    assert all(case.instructions("sm_90a") > 0 for case in predicted.CASES.values())
