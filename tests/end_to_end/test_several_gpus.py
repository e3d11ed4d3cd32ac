# SPDX-License-Identifier: Apache-2.0
"""`examples/train_llama.py` on several ranks, by DDP, FSDP2 and tensor parallel, against one
process. The ranks have torchrun's environment."""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_llama  # noqa: E402
from several_gpus import Team  # noqa: E402

from tests.end_to_end.distributed.ranks import run  # noqa: E402

STEPS = 3
# bf16 logits: 2**-9 of a loss of about 5. The random bits of so few steps add less than that.
BUDGET = 0.01


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "squares.txt"
    file.write_text("\n".join(f"the square of {i} is {i * i}." for i in range(900)))
    return file


# Processes that have imported everything train in one way after the other, in one process group.
WORKER = """
import json, sys
import torch
sys.path.insert(0, {examples!r})
import several_gpus, train_llama
several_gpus.Team.close = lambda team: None
for arguments in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    assert train_llama.main(arguments) == 0
"""


def command(corpus: Path, out: Path, how: list[str]) -> list[str]:
    """The arguments of a run with its results in ``out``."""
    common = ["--size", "tiny", "--steps", str(STEPS), "--batch", "4", "--seq", "64"]
    common += ["--vocab", "256", "--eval-batches", "1", "--compile-options", '{"inner": "eager"}']
    common += ["--device", "cpu", "--data", str(corpus)]
    common += ["--recipes", "quartet2"]
    return [*common, "--out", str(out), *how]


def losses(out: Path) -> dict[tuple[str, int], float]:
    """(split, step) -> loss."""
    with open(out / "quartet2-seed0" / "losses.csv", newline="") as file:
        return {(r["split"], int(r["step"])): float(r["loss"]) for r in csv.DictReader(file)}


@pytest.fixture(scope="module")
def one_process(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    torch._dynamo.reset()
    assert train_llama.main(command(corpus, out, [])) == 0
    return out


WAYS = {"ddp": ["--ddp"], "fsdp": ["--fsdp"], "tp": ["--tp", "2"]}


@pytest.fixture(scope="module")
def two_processes(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = [command(corpus, folder / name, how) for name, how in WAYS.items()]
    worker = corpus.parent / "worker.py"
    worker.write_text(WORKER.format(examples=str(EXAMPLES)))
    printed = run(
        str(worker), 2, json.dumps(runs), module="transformers.models.llama.modeling_llama"
    )
    assert printed.count("reading") == len(runs)  # one process speaks
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_process(way: str, one_process: Path, two_processes: Path) -> None:
    found, wanted = losses(two_processes / way), losses(one_process)
    assert found.keys() == wanted.keys()
    for key, loss in found.items():
        assert loss == pytest.approx(wanted[key], abs=BUDGET), key


@pytest.mark.parametrize("way", WAYS)
def test_the_report_of_a_rank(way: str, two_processes: Path) -> None:
    report = (two_processes / way / "graphs" / "quartet2" / "rank0" / "report.txt").read_text()
    assert "model.layers.0.mlp.down_proj" in report and "7 of 8 matmuls" in report


def arguments(**given: object) -> Namespace:
    return Namespace(**{"ddp": False, "fsdp": False, "tp": 1, "batch": 4, "device": "cpu", **given})


@pytest.mark.parametrize(
    ("processes", "given", "message"),
    [
        (None, {"ddp": True}, "torchrun"),
        (2, {}, "need one of --ddp, --fsdp and --tp"),
        (2, {"tp": 3}, "got 3; allowed: a divisor of 2"),
        (2, {"tp": 0}, "got 0; allowed: a divisor of 2"),
        (2, {"fsdp": True, "batch": 3}, "got 3; allowed: a multiple of 2"),
        (4, {"tp": 2}, "--tp 2 with 4 processes needs --fsdp"),
        (2, {"tp": 2, "ddp": True}, "--tp 2 with 2 processes needs --fsdp"),
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
