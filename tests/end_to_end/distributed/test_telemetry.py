# SPDX-License-Identifier: Apache-2.0
"""Telemetry on several ranks: one file for each, the same training, and no further collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from q2compile.telemetry.read import read_folder
from tests.end_to_end.distributed.test_distributed import BLOCKS, Ranks, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("telemetry")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, Ranks]:
    return run("telemetry.py", 2, folder)


@pytest.mark.parametrize("scenario", ["buckets", "fsdp", "tensor"])
def test_training_is_the_same(scenario: str, ranks: dict[str, Ranks]) -> None:
    for own, plain in zip(ranks[scenario], ranks[f"{scenario}_plain"], strict=True):
        assert not own.error and not plain.error, own.error + plain.error
        assert own.losses == plain.losses and own.collectives == plain.collectives
        for one, other in ((own.gradients, plain.gradients), (own.parameters, plain.parameters)):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("scenario", "modules"),
    [
        ("buckets", {name for name in (*BLOCKS, "head") if not name.endswith("down")}),
        ("fsdp", {name for name in BLOCKS if not name.endswith("down")}),
        ("tensor", {*BLOCKS[:3], "head"}),
    ],
)
def test_files(scenario: str, modules: set[str], folder: Path, ranks: dict[str, Ranks]) -> None:
    """Every rank records all its matmuls, by the user's names, with its own values."""
    amax = []
    for rank in (0, 1):
        lines = (folder / scenario / f"rank{rank}.jsonl").read_text().splitlines()
        start, *records = map(json.loads, lines)
        assert (start["rank"], start["ranks"]) == (rank, 2)
        assert {r["step"] for r in records} == {0, 2}
        assert {r["module"] for r in records} == modules
        assert len(records) == 2 * 6 * len(modules)
        amax.append([r["amax"] for r in records if (r["gemm"], r["operand"]) == ("wgrad", "dy")])
    assert amax[0] != amax[1]
    summary = json.loads((folder / scenario / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["step"] == 2
    assert read_folder(folder / scenario)["ranks"] == [0, 1]
