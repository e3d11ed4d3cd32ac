# SPDX-License-Identifier: Apache-2.0
"""`torchrun examples/train_llama.py`, by DDP, FSDP2 and tensor parallel, against one process."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from several_gpus import Team  # noqa: E402

STEPS = 5
# bf16 logits: 2**-9 of a loss of about 5. The random bits of so few steps add less than that.
BUDGET = 0.01


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "squares.txt"
    file.write_text("\n".join(f"the square of {i} is {i * i}." for i in range(900)))
    return file


def train(corpus: Path, out: Path, processes: int, *how: str) -> dict[tuple[str, str, int], float]:
    """(recipe, split, step) -> loss."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(processes)]
    command += [str(EXAMPLES / "train_llama.py"), "--size", "tiny", "--steps", str(STEPS)]
    command += ["--batch", "4", "--seq", "64", "--vocab", "256", "--eval-batches", "2"]
    command += ["--compile-options", '{"inner": "eager"}', "--device", "cpu"]
    command += ["--data", str(corpus), "--out", str(out), *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("reading") == 1  # one process speaks
    losses = {}
    for recipe in ("bf16", "quartet2"):
        with open(out / f"{recipe}-seed0" / "losses.csv", newline="") as file:
            for row in csv.DictReader(file):
                losses[recipe, row["split"], int(row["step"])] = float(row["loss"])
    return losses


@pytest.fixture(scope="module")
def one_process(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return train(corpus, tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize("how", [["--ddp"], ["--fsdp"], ["--tp", "2"]])
def test_losses_are_those_of_one_process(
    how: list[str], corpus: Path, one_process: dict, tmp_path: Path
) -> None:
    losses = train(corpus, tmp_path, 2, *how)
    assert losses.keys() == one_process.keys()
    for key, loss in losses.items():
        assert loss == pytest.approx(one_process[key], abs=BUDGET), key
    first = ("quartet2", "train", 1)
    assert losses[first] != losses[("bf16", "train", 1)]
    report = (tmp_path / "graphs" / "quartet2" / "rank0" / "report.txt").read_text()
    assert "model.layers.0.mlp.down_proj" in report and "7 of 8 matmuls" in report


def arguments(**given: object) -> Namespace:
    return Namespace(**{"ddp": False, "fsdp": False, "tp": 1, "batch": 4, "device": "cpu", **given})


@pytest.mark.parametrize(
    ("processes", "given", "message"),
    [
        (None, {"ddp": True}, "torchrun"),
        (2, {}, "say how, by --ddp, --fsdp or --tp"),
        (2, {"tp": 3}, "2 processes can't form groups"),
        (2, {"tp": 0}, "can't form groups"),
        (2, {"fsdp": True, "batch": 3}, "not to be cut among 2"),
        (4, {"tp": 2}, "the rest is for --fsdp"),
        (2, {"tp": 2, "ddp": True}, "the rest is for --fsdp"),
    ],
)
def test_what_does_not_fit_is_refused(
    processes: int | None,
    given: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(ValueError, match=message):
        Team(arguments(**given))
