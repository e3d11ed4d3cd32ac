# SPDX-License-Identifier: Apache-2.0
"""A process in which q2compile has trained a model is, for all else in it, as one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import forked, neighbors_models
from tests.support.neighbors_state import names

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CASES = names()

# Registrations under q2compile's own names. Any other change is a fault.
OWN = (
    "[q2.",  # lowerings of ops of its own
    "[quartet2]",  # the backend
    "logger q2compile",  # the first graph is announced on stderr
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The changes up to the end of each case, seen by a fresh process."""
    file = tmp_path_factory.mktemp("state") / "changes.json"
    done = forked.run_file(SUPPORT / "neighbors_state.py", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_torch_alone_changes_nothing(found: dict[str, dict[str, str]]) -> None:
    """Otherwise the other tests would report changes that torch makes."""
    assert found["by torch"] == {}


@pytest.mark.parametrize("case", CASES)
def test_torch_and_python_are_as_before(case: str, found: dict[str, dict[str, str]]) -> None:
    others = {name for name in found[case] if not any(own in name for own in OWN)}
    assert sorted(others) == []


def test_the_test_sees_what_is_registered(found: dict[str, dict[str, str]]) -> None:
    """A lowering of q2compile's own, in a dictionary of torch's."""
    seen = found["recipes"]
    assert "torch._inductor.lowering:lowerings[q2.gemm.default]" in seen


# ---- other models -------------------------------------------------------------------------------


def compiled_models(folder: Path, which: str) -> dict[str, Any]:
    """The output of `neighbors_models`. Both processes share the folder of compiled objects, so the
    C++ compiler compiles equal sources once."""
    file = folder / f"{which}.pt"
    done = forked.run_file(SUPPORT / "neighbors_models.py", str(file), which)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(file)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """In a process in which q2compile has trained, and in one without it."""
    folder = tmp_path_factory.mktemp("models")
    return {which: compiled_models(folder, which) for which in ("without", "with")}


def test_there_are_enough_models() -> None:
    assert len(neighbors_models.CASES) >= 40


@pytest.mark.parametrize("case", neighbors_models.graphs())
def test_the_same_code_and_bits(case: str, models: dict[str, dict[str, Any]]) -> None:
    code, results = models["without"]["cases"][case]
    other_code, other_results = models["with"]["cases"][case]
    assert code and other_code == code
    assert len(results) == len(other_results)
    for one, other in zip(results, other_results, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits = [x.contiguous().flatten().view(torch.uint8) for x in (one, other)]
        assert torch.equal(*bits)  # NaN is NaN


def test_a_compiled_optimizer_of_another_model(models: dict[str, dict[str, Any]]) -> None:
    """The same numbers of frames and graph breaks, and no recompilation."""
    assert models["with"]["optimizer"] == models["without"]["optimizer"]


def test_what_a_user_has_set_stays(models: dict[str, dict[str, Any]]) -> None:
    """A choices handler, a lowering, a pass and a setting of Inductor: they are used for the
    user's model, compiled after models with q2compile were."""
    assert models["with"]["set by the user"] == dict.fromkeys(neighbors_models.OF_THE_USER, True)
