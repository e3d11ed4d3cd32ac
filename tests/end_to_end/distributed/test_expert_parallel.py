# SPDX-License-Identifier: Apache-2.0
"""Expert parallel with FSDP2, mixed precision and checkpoints (expert_parallel.py): the gradients
of two ranks against those of one process in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end.distributed.ranks import run

# The largest relative squared error of an operand, by recipe (recipes' papers): MS-EDEN, stochastic
# rounding.
ERROR = {"quartet2": 9.4e-3, "nvfp4": 23.5e-3}
# Quantized operands on the way to the first block's gradient: of four GEMMs of the forward, three
# dgrads and its wgrad.
OPERANDS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    run("expert_parallel.py", 2, str(folder))
    return folder


@pytest.fixture(scope="module")
def gradients(folder: Path) -> tuple[dict[str | None, dict[str, Tensor]], dict[str, Tensor]]:
    return torch.load(folder / "gradients.pt")


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten().float(), b.flatten().float(), 0))


@pytest.mark.parametrize("recipe", [None, *ERROR])
def test_the_ranks_gradients_are_those_of_one_process(recipe: str | None, gradients) -> None:
    found, whole = gradients
    # In bf16, 2**-9 an operand, and the router's choices of close calls: a percent.
    least = 0.99 if recipe is None else (1 + OPERANDS * ERROR[recipe]) ** -0.5
    assert found[recipe].keys() == whole.keys()
    for name, gradient in whole.items():
        assert cosine(found[recipe][name], gradient) > least, name
        # A sum that is missing, or added twice, gives .5 or 2.
        assert 0.85 < found[recipe][name].norm() / gradient.norm() < 1.15, name


@pytest.mark.parametrize("recipe", ERROR)
def test_an_expert_without_tokens_has_no_gradient(recipe: str, gradients) -> None:
    found, _ = gradients
    for name, gradient in found[recipe].items():
        if "experts" in name:
            assert [bool(g.any()) for g in gradient] == [True, True, False, True], name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("recipe", ERROR)
def test_the_report_has_a_row_for_each_stack_of_a_rank(recipe, rank, folder: Path) -> None:
    """Each rank's stack has half of the experts, for any number of tokens. The second block runs
    the same graph."""
    rows = json.loads((folder / recipe / f"rank{rank}" / "report.json").read_text())
    taken = {row["module"]: row["shape"] for row in rows if row["taken"]}
    assert list(taken) == ["layers.0.experts.up", "layers.0.experts.down"]
    assert [(s[0], *s[2:]) for s in taken.values()] == [(2, 96, 64), (2, 64, 96)]
    assert not any(".experts." in row["module"] for row in rows if not row["taken"])
