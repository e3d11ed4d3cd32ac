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

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
# The one row outside of its aim: the model leaves out host time of buffers and of saved tensors.
MISSED = {"host_us_per_linear"}
# requantize_bf16, at both shapes: its dequantized columns take longer than its bytes say.
# The others, at one: measured before the kernels took fewer instructions, and 14% and 15% low then.
MISSED_KERNELS = {
    "requantize_bf16 8192x4096",
    "requantize_bf16 16384x8192",
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


def test_every_case_is_counted_for_every_architecture(predicted) -> None:
    architectures = {device.architecture for device in devices.DATA_SHEETS}
    assert all(set(counts) == architectures for counts in counted().values())
    assert all(case.instructions("sm_90a") > 0 for case in predicted.CASES.values())
