# SPDX-License-Identifier: Apache-2.0
"""The loop of examples/pretraining: it resumes with the same bits, and is the same for all runs."""

from __future__ import annotations

import csv
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import pretrain  # noqa: E402
from pretraining import runs  # noqa: E402
from pretraining.batches import Windows  # noqa: E402
from pretraining.comparison import Comparison, Data  # noqa: E402
from pretraining.corpus import build  # noqa: E402
from pretraining.record import Losses, Result  # noqa: E402
from pretraining.results import run_folder  # noqa: E402
from pretraining.training import Rhythm, Setup, Stopped  # noqa: E402
from several_gpus import Team  # noqa: E402

from tests.support import forked  # noqa: E402

STEPS, BATCH, SEQ, VOCAB = 8, 2, 16, 300
LATE = replace(runs.RUNS["quartet2-late"], late_at=0.5)  # switches inside of the resumed half

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def comparison(folder: Path, options: dict | None = None, **rhythm: object) -> Comparison:
    """A comparison on the smallest Llama; the graphs run without Inductor."""
    train, val = (tokens(n, n).numpy().astype("uint16") for n in (1000, 100))
    data = Data(
        lambda seed: Windows(train, STEPS, BATCH, SEQ, seed),
        Windows(val, 3, BATCH, SEQ, None),
        {"name": "random"},
    )
    setup = Setup("tiny", VOCAB, STEPS, BATCH, SEQ, "cpu", compile_options={"inner": "eager"})
    setup = replace(setup, **(options or {}))
    given = {"eval_every": 4, "save_every": 1e9, **rhythm}
    team = Team(Namespace(fsdp=False, ddp=False, tp=1, batch=BATCH, device="cpu"))
    return Comparison(folder, setup, Rhythm(**given), data, team, "a test")


def numbers(folder: Path, run: str, seed: int = 0) -> list[tuple]:
    """All of losses.csv but the seconds."""
    points = Losses.read(run_folder(folder, run, seed) / "losses.csv").points
    return [(p.step, p.split, p.loss, str(p.grad_norm), p.lr) for p in points]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """(folder with seeds 0 and 1 of LATE, trained in one go; graphs compiled after each seed)."""
    folder = tmp_path_factory.mktemp("whole")
    torch._dynamo.reset()
    counters.clear()
    trained = comparison(folder).train(LATE, [0, 1])
    return folder, [counters["stats"]["unique_graphs"] for _ in trained]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with seed 0 of bf16, of the same with its batches backwards, and of quartet2."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("bf16", "bf16-backwards", "quartet2"):
        list(comparison(folder).train(runs.RUNS[name], [0]))
    return folder


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    whole: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """Losses, norms, rates and validation, which depend on MS-EDEN's random bits from the first
    step on.

    The run stops before and after the late switch. In between the process is killed, after it wrote
    rows that are newer than its checkpoint.
    """
    losses = run_folder(tmp_path, LATE.name, 0) / "losses.csv"
    for stop in (2, 5):
        with pytest.raises(Stopped, match=f"after step {stop} of {STEPS}"):
            list(comparison(tmp_path, stop_at=stop).train(LATE, [0]))
        with open(losses, "a", newline="") as rows:  # the last one is cut short
            rows.write(f"{stop + 1},train,9.9,1.0,0.1,0.1\r\n{stop + 2},train,9.")
        torch._dynamo.reset()
        torch.manual_seed(1234)  # another process has other generators
    with pytest.raises(ValueError, match="of a run with another setup"):
        list(comparison(tmp_path, {"lr": 0.5}).train(LATE, [0]))
    list(comparison(tmp_path).train(LATE, [0]))
    assert numbers(tmp_path, LATE.name) == numbers(whole[0], LATE.name)
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.unfinished"))


def test_a_seed_is_the_same_alone_as_after_another(
    whole: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """New weights in the old memory, nothing left of the seed before; and the same whenever its
    losses are read, as on a GPU, where nothing waits for the device at every step. A validation on
    the way may take less, and the last takes all."""
    (done,) = comparison(tmp_path, fetch_every=3, eval_batches=1).train(LATE, [1])
    alone, after = numbers(tmp_path, LATE.name, 1), numbers(whole[0], LATE.name, 1)
    assert len(done.result.val_losses) == 3
    validations = [i for i, (_, split, *_) in enumerate(after) if split == "val"]
    assert [i for i, row in enumerate(after) if row != alone[i]] == validations[:1]
    assert len(alone) == len(after) and len(validations) == 2
    assert numbers(whole[0], LATE.name, 0) != after


def test_the_seeds_of_a_run_compile_once(whole: tuple[Path, list[int]]) -> None:
    assert whole[1] == [2, 2]  # before the late switch and after it


def test_the_late_switch_changes_the_run_from_its_step_on(
    whole: tuple[Path, list[int]], plain: Path
) -> None:
    both = zip(numbers(plain, "quartet2"), numbers(whole[0], LATE.name), strict=True)
    same = [early[2] == late[2] for early, late in both if early[1] == "train"]
    assert same == [True] * 4 + [False] * 4


def test_runs_start_from_the_same_weights_on_the_same_batches(plain: Path) -> None:
    bf16, backwards, quartet2 = (
        numbers(plain, name)[0][2] for name in ("bf16", "bf16-backwards", "quartet2")
    )
    assert 0 < abs(quartet2 - bf16) < 0.01  # the forward's quantization
    # The same sequences: a mean of 30 fp32 losses near 5.7 in another order.
    assert backwards == pytest.approx(bf16, abs=30 * 5.7 * 2**-24)
    assert numbers(plain, "bf16") != numbers(plain, "bf16-backwards")


def test_a_run_that_ends_in_nan_says_where_and_the_next_goes_on(tmp_path: Path) -> None:
    """An infinite rate: the first update leaves no finite weight, so the second loss is NaN."""
    compared, bf16 = comparison(tmp_path, {"lr": math.inf}), runs.RUNS["bf16"]
    ended = [finished.result for finished in compared.train(bf16, [0, 1])]
    assert [(result.seed, result.diverged_at) for result in ended] == [(0, 2), (1, 2)]
    assert [row[0] for row in numbers(tmp_path, "bf16")] == [1, 2]
    assert Result.read(run_folder(tmp_path, "bf16", 0) / "result.json").diverged_at == 2
    assert list(compared.train(bf16, [0, 1])) == []  # not tried again


def test_a_result_says_what_was_run(whole: tuple[Path, list[int]]) -> None:
    folder, _ = whole
    result = Result.read(run_folder(folder, LATE.name, 0) / "result.json")
    assert result.run["options"] == {"recipe": "quartet2", "policy": {"*lm_head*": "bf16"}}
    assert result.run["late"]["recipe"] == {"base": "quartet2", "fprop": "bf16"}
    assert result.setup["steps"] == STEPS and result.seed == 0 and not result.diverged_at
    assert result.val_loss == pytest.approx(sum(result.val_losses) / 3)
    assert result.val_loss == numbers(folder, LATE.name)[-1][2]
    assert {"torch", "q2compile"} <= set(result.provenance["versions"])
    with pytest.raises(ValueError, match="with another setup: delete it, or give another --out"):
        list(comparison(folder, {"lr": 0.5}).train(LATE, [0]))


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "text"
    folder.mkdir()
    for part in range(40):
        lines = [f"the square of {i} is {i * i}." for i in range(100 * part, 100 * part + 100)]
        (folder / f"{part}.txt").write_text("\n".join(lines))
    yield folder


def test_a_killed_process_loses_the_steps_since_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """`kill -9` of the command while it trains; the same command then ends as if nothing was."""
    corpus = tmp_path / "corpus"
    build([text], corpus, name="squares", vocab=300, val_bytes=4000, say=lambda line: None)
    command = ["train", "--corpus", str(corpus)]
    command += ["--runs", "quartet2", "--size", "tiny", "--batch", "2", "--seq", "16"]
    command += ["--tokens", str(16 * 32), "--evals", "2", "--device", "cpu", "--save-every", "0"]
    command += ["--compile-options", '{"inner": "eager"}', "--eval-batches", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    program = EXAMPLES / "pretrain.py"
    process = forked.start_file(program, *command, "--out", str(killed), OMP_NUM_THREADS="1")
    losses = run_folder(killed, "quartet2", 0) / "losses.csv"
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if losses.exists() and losses.read_text().count("\n") > 6:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # a zombie, if it has ended with an error
    assert process.wait().returncode == -signal.SIGKILL
    assert (losses.parent / "checkpoint.pt").exists()
    for out in (killed, whole):
        assert pretrain.main([*command, "--out", str(out)]) == 0
    assert numbers(killed, "quartet2") == numbers(whole, "quartet2")
    with open(losses, newline="") as file:
        assert [int(r["step"]) for r in csv.DictReader(file) if r["split"] == "train"] == list(
            range(1, 17)
        )
    assert (killed / "gaps.png").exists() and "quartet2" in (killed / "table.txt").read_text()
