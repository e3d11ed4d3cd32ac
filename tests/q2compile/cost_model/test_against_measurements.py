"""The cost model against what was measured on an H200 (examples/benchmarks/results), and where its
constants come from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from q2compile.cost_model import devices
from q2compile.cost_model.quantisers import counted

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
# Outside of the aim of 20%: what the host takes for a linear in a training step is more than its
# calls, buffers and what autograd keeps.
MISSED = {"host_us_per_linear"}


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import predicted
    finally:
        sys.path.remove(str(BENCHMARKS))
    return predicted


def recorded(file: str) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((BENCHMARKS / "results" / file).read_text())}


def test_kernels_within_15_percent(predicted) -> None:
    rows = list(predicted.kernels())
    assert len(rows) >= 35 and {row.target for row in rows} == {0.15}
    assert {row.name: row.error for row in rows if abs(row.error) > row.target} == {}
    assert abs(sum(row.error for row in rows) / len(rows)) < 0.02  # neither high nor low as a whole


def test_layers_and_steps_within_20_percent(predicted) -> None:
    compared = (*predicted.linears(), *predicted.steps(), *predicted.of_the_host())
    rows = {row.name: row for row in compared}
    shapes = {"linear_4096_4096", "linear_4096_14336", "llama_step", "llama_30m_64x512"}
    assert {*shapes, "llama_30m_8x512"} <= set(rows) and {row.target for row in rows.values()} == {
        0.20
    }
    outside = {name: row.error for name, row in rows.items() if abs(row.error) > row.target}
    assert set(outside) == MISSED, outside


def test_the_page_is_what_the_model_says(predicted) -> None:
    """examples/benchmarks/PREDICTED.md; its script writes it."""
    assert predicted.PAGE_FILE.read_text(encoding="utf-8") == predicted.page()


def test_what_the_host_takes_is_what_was_recorded() -> None:
    kernels, steps = recorded("kernels.json"), recorded("steps.json")
    rows = (
        kernels["host_launch"],
        kernels["host_copy"],
        kernels["host_dequantize"],
        steps["host_us_per_call"],
    )
    constants = (
        devices.HOST_LAUNCH,
        devices.HOST_TORCH,
        devices.HOST_DISPATCHED,
        devices.HOST_CALL,
    )
    assert [row["ratio"] for row in rows] == pytest.approx([1e6 * c for c in constants])


def test_what_was_set_by_measurements() -> None:
    """The copy's bandwidth, BF16's share of the peak, and what of a call does not grow with it."""
    rows = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())
    micro = {(row["name"], *row["shape"]): row.get("microseconds", 0.0) for row in rows}
    copied = 4 * 16384 * 8192 / micro["copy", 16384, 8192] * 1e6 / devices.H200.bandwidth
    assert devices.MEMORY_SHARE < copied < devices.MEMORY_SHARE + 0.05
    linear = recorded("models.json")["linear_4096_4096"]["bf16"] * 1e-3
    share = 3 * 2 * 16384 * 4096**2 / linear / devices.H200.flops["bf16"]
    assert devices.H200.gemm_share["bf16"] == pytest.approx(share, abs=0.01)
    constant = [
        (4 * micro[name, 8192, 4096] - micro[name, 16384, 8192]) / 3 / 2
        for name in ("rht_quantize_row", "rht_quantize_col", "rht_quantize_both", "requantize")
    ]
    assert min(constant) - 0.3 < devices.LAUNCH_SECONDS * 1e6 < max(constant)


def test_instructions_are_of_every_architecture(predicted) -> None:
    architectures = {device.architecture for device in devices.DATA_SHEETS}
    assert all(set(counts) == architectures for counts in counted().values())
    assert all(case.instructions("sm_90a") > 0 for case in predicted.CASES.values())
