# SPDX-License-Identifier: Apache-2.0
"""FSDP1 is not supported. Whoever could have trained with it unnoticed is told, and told what to
use."""

from __future__ import annotations

import pytest

from tests.end_to_end.distributed.test_distributed import Ranks, run

UNSUPPORTED = "FullyShardedDataParallel (FSDP1) is not supported while fully_shard (FSDP2) is"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    return run("fsdp1.py", 2, tmp_path_factory.mktemp("fsdp1"))


def test_the_first_line_and_the_report(ranks: dict[str, Ranks]) -> None:
    first, other = ranks["plain"]
    names = [f"layers.0.{name}" for name in ("gate", "up", "down")]
    line = f"q2compile: 0 of 3 matmuls quantized; left: {', '.join(names)} ({UNSUPPORTED})"
    assert first.notes.count(line) == 1 and line not in other.notes
    for result in (first, other):
        assert not result.error
        assert f"{UNSUPPORTED}: no layer of FullyShardedDataParallel is quantized" in result.notes
        assert [row["module"] for row in result.rows if row["why"] == UNSUPPORTED] == names


def test_strict_names_it(ranks: dict[str, Ranks]) -> None:
    for result in ranks["strict"]:
        assert "NotTakenError: strict: 3 matmul(s) with a weight were not taken" in result.error
        assert f"layers.0.up: {UNSUPPORTED}" in result.error
        assert "graph break" not in result.error


@pytest.mark.parametrize("scenario", ["expected_before", "expected_after"])
def test_expect_names_it(scenario: str, ranks: dict[str, Ranks]) -> None:
    """Also if it was called before the model was wrapped."""
    for result in ranks[scenario]:
        assert result.error.startswith("NotTakenError: expect: nothing of ")
        assert f"runs in 4 bits: {UNSUPPORTED}." in result.error


@pytest.mark.parametrize("scenario", ["not_compiled", "flat_parameters"])
def test_expect_names_it_at_exit_if_no_graph_came(scenario: str, ranks: dict[str, Ranks]) -> None:
    first, other = ranks[scenario]
    (line,) = {text for text in first.notes if "expect" in text}
    assert line.startswith(f"q2compile: expect: nothing of Model runs in 4 bits: {UNSUPPORTED}")
    assert not other.notes
