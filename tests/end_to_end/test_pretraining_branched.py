# SPDX-License-Identifier: Apache-2.0
"""Branched runs of examples/pretraining: stems, variants that go on from them, their pairs."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from pretraining import page, plan, runs  # noqa: E402
from pretraining.batches import Windows  # noqa: E402
from pretraining.branching import Branch  # noqa: E402
from pretraining.comparison import Comparison, Data  # noqa: E402
from pretraining.gaps import gaps  # noqa: E402
from pretraining.record import Losses, Result  # noqa: E402
from pretraining.results import run_folder  # noqa: E402
from pretraining.training import Rhythm, Setup, Stopped  # noqa: E402
from several_gpus import Team  # noqa: E402

from q2compile import Config  # noqa: E402

STEPS, BRANCH, BATCH, SEQ, VOCAB = 8, 4, 2, 16, 300
BF16, TWIN = runs.RUNS["bf16"], replace(runs.RUNS["bf16"], name="twin", perturbed=1e-6)
PLAN = EXAMPLES / "pretraining" / "plans.toml"

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def comparison(folder: Path, branch: Branch | None = None, **rhythm: object) -> Comparison:
    """A comparison on the smallest Llama; the graphs run without Inductor."""
    generator = torch.Generator().manual_seed(0)
    train, val = (
        torch.randint(VOCAB, (n,), generator=generator).numpy().astype("uint16")
        for n in (1000, 100)
    )
    data = Data(
        lambda seed: Windows(train, STEPS, BATCH, SEQ, seed),
        Windows(val, 3, BATCH, SEQ, None),
        {"name": "random", "corpus": "abc", "tokens": STEPS * BATCH * SEQ, "epochs": 0.3},
    )
    setup = Setup("tiny", VOCAB, STEPS, BATCH, SEQ, "cpu", compile_options={"inner": "eager"})
    given = {"eval_every": STEPS, "save_every": 1e9, **rhythm}
    team = Team(Namespace(fsdp=False, ddp=False, tp=1, batch=BATCH, device="cpu"))
    return Comparison(folder, setup, Rhythm(**given), data, team, "a test", branch=branch)


def losses(folder: Path, run: str, seed: int = 0) -> list[tuple]:
    """All of losses.csv but the seconds, from the branch step on."""
    points = Losses.read(run_folder(folder, run, seed) / "losses.csv").points
    return [(p.step, p.split, p.loss, str(p.grad_norm), p.lr) for p in points if p.step > BRANCH]


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeds 0 and 1 of bf16, its twin and quartet2, each from the stem of its seed."""
    folder = tmp_path_factory.mktemp("branched")
    torch._dynamo.reset()
    compared = comparison(folder, Branch(BRANCH, folder / "stems"))
    compared.train_stems([0, 1])
    for run in (BF16, TWIN, runs.RUNS["quartet2"]):
        list(compared.train(run, [0, 1]))
    return folder


def result(folder: Path, run: str, seed: int = 0) -> Result:
    return Result.read(run_folder(folder, run, seed) / "result.json")


def test_a_variant_without_a_difference_has_the_bits_of_the_whole_run(
    branched: Path, tmp_path: Path
) -> None:
    """Batches, schedule, optimizer and weights of bf16 go on as if it had never left."""
    list(comparison(tmp_path).train(BF16, [0, 1]))
    for seed in (0, 1):
        assert losses(branched, "bf16", seed) == losses(tmp_path, "bf16", seed)
    assert losses(branched, "bf16", 0) != losses(branched, "bf16", 1)


def test_a_twin_moves_as_little_as_its_perturbation(branched: Path) -> None:
    """A relative 1e-6 of each weight: about that of the loss near 5.7, in fp32 of 5e-7."""
    loss, twin = (losses(branched, name)[0][2] for name in ("bf16", "twin"))
    assert 0 < abs(loss - twin) < 1e-4
    assert losses(branched, "twin", 0) != losses(branched, "twin", 1)


def test_a_recipe_differs_from_its_first_step_on(branched: Path) -> None:
    (bf16, *_), (quartet2, *_) = losses(branched, "bf16"), losses(branched, "quartet2")
    assert bf16[0] == quartet2[0] == BRANCH + 1 and bf16[4] == quartet2[4]
    assert 1e-5 < abs(bf16[2] - quartet2[2]) < 0.1


def test_stems_are_trained_once_and_stopped_stems_go_on(branched: Path, tmp_path: Path) -> None:
    stems = tmp_path / "stems"
    branch = Branch(BRANCH, stems)
    compared = comparison(tmp_path, branch, deadline=0.0)
    with pytest.raises(Stopped, match="after step 1 of 8"):
        compared.train_stems([0])
    assert compared.missing_stems([0, 1]) == [0, 1]
    torch.manual_seed(1234)  # another process has other generators
    compared = comparison(tmp_path, branch)
    compared.train_stems([0])
    assert compared.missing_stems([0, 1]) == [1]
    whole = result(branched, "bf16").provenance
    assert compared.stem(0).weights_hash == whole["stem"] and whole["branch"] == BRANCH
    written = compared.stem(0).checkpoint.stat().st_mtime_ns
    compared.train_stems([0])
    assert compared.stem(0).checkpoint.stat().st_mtime_ns == written


def test_a_stem_is_what_defines_it(tmp_path: Path) -> None:
    compared = comparison(tmp_path, Branch(BRANCH, tmp_path))
    stem = compared.stem(0)
    others = [
        compared.stem(1),
        replace(compared, branch=Branch(BRANCH + 1, tmp_path)).stem(0),
        replace(compared, setup=replace(compared.setup, lr=0.5)).stem(0),
    ]
    assert len({stem.folder, *(other.folder for other in others)}) == 4
    assert comparison(tmp_path / "x", Branch(BRANCH, tmp_path)).stem(0) == stem


def test_a_result_of_another_stem_is_not_taken_for_this_one_s(branched: Path) -> None:
    """The stem of a second machine has other bits."""
    compared = comparison(branched, Branch(BRANCH, branched / "stems"))
    assert compared.is_finished(BF16, 0)
    facts = compared.stem(0).facts
    before = facts.read_text()
    facts.write_text(before.replace(compared.stem(0).weights_hash, "0" * 16))
    with pytest.raises(ValueError, match="of a run with another stem: delete it"):
        compared.is_finished(BF16, 0)
    facts.write_text(before)


# ----------------------------------------------------------------------------------------- pairs


def paired(name: str, seed: int, loss: float, stem: str) -> Result:
    setup = {"batch": 2, "seq": 4, "size": "tiny", "steps": 3}
    times = (0.5, 9.0, 16.0, 0)
    return Result({"name": name}, setup, seed, 0, loss, [loss, loss], *times, {"stem": stem})


def test_pairs_share_a_stem() -> None:
    bf16 = [paired("bf16", 0, 1.0, "a"), paired("bf16", 1, 1.0, "b")]
    run = [paired("a", 0, 1.5, "another"), paired("a", 1, 1.1, "b")]
    assert gaps([*bf16, *run], [("a", "bf16")], 0.1)["a", "bf16"].mean == pytest.approx(0.1)


def test_four_seeds_have_an_error_of_their_own() -> None:
    """a is nearly exact, b is not: with four seeds neither lends its spread to the other."""
    every = [paired("bf16", s, 1.0, "x") for s in range(4)]
    every += [paired("a", s, 1.01 + 1e-4 * (s % 2), "x") for s in range(4)]
    every += [paired("b", s, 1.01 + 1e-2 * (s % 2), "x") for s in range(4)]
    found = gaps(every, [("a", "bf16"), ("b", "bf16")])
    # Deviation of 0, d, 0, d: d / sqrt(3); over the root of four.
    for name, step in (("a", 1e-4), ("b", 1e-2)):
        assert found[name, "bf16"].error == pytest.approx(step / math.sqrt(12))


# ------------------------------------------------------------------------------------ page, plans


def test_branched_runs_have_a_file_of_their_own(branched: Path, tmp_path: Path) -> None:
    """Rows with branch and stem, gaps of twins, and no times."""
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "tiny").symlink_to(branched)
    (written,) = page.write(tmp_path, folder)
    assert written.name == "branched.md" and not (tmp_path / "gaps.json").exists()
    rows = {(r["run"], r["seed"]): r for r in json.loads((tmp_path / "branched.json").read_text())}
    assert len(rows) == 6
    row, bf16 = rows["twin", 1], rows["bf16", 1]
    assert row["branch"] == BRANCH and row["stem"] == bf16["stem"] != rows["twin", 0]["stem"]
    assert row["perturbed"] == 1e-6 and row["step_seconds"] is None
    assert row["gap"] == pytest.approx(row["val_loss"] - bf16["val_loss"], abs=2e-6)
    text = written.read_text()
    assert f"branched after step {BRANCH} of {STEPS}" in text
    assert "| run | stems | gap to BF16 |" in text
    assert (tmp_path / "gaps-tiny.png").exists()


def test_a_page_of_runs_without_bf16_has_no_curves_over_it(branched: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "more"
    folder.mkdir(parents=True)
    for run in branched.glob("quartet2-seed*"):
        (folder / run.name).symlink_to(run)
    (written,) = page.write(tmp_path, tmp_path / "runs")
    assert "| `quartet2` | 2 |" in written.read_text()
    assert not list(tmp_path.glob("gaps-*.png"))


# Arms of the plan that train here: another recipe, and linear layers with a state that is measured
# first. test_pretraining_linears.py has each class of linear layer.
ARMS = {"mxfp4_2d-signs-per-step", "quartet2-search-fixed-balance"}


def asked(folders: tuple[str, ...] = ()) -> list[plan.Job]:
    """The comparisons of the plan."""
    given = {"seeds": [0], "tokens": 1.0, "size": "30m", "branch_at": None}
    return plan.jobs(Namespace(plan=PLAN, folders=folders, **given))


def test_the_arms_train(branched: Path) -> None:
    """Each resumes from the stem of seed 0, and ends with other weights."""
    planned = [runs.parse(name) for job in asked() for name in job.runs]
    arms = {run.name: run for run in planned if run.name in ARMS}
    compared = comparison(branched, Branch(BRANCH, branched / "stems"))
    for run in arms.values():
        list(compared.train(run, [0]))
    found = {name: result(branched, name).val_loss for name in arms}
    assert set(found) == ARMS
    assert all(math.isfinite(loss) for loss in found.values())
    others = {result(branched, run).val_loss for run in ("bf16", "quartet2")}
    assert len({*others, *found.values()}) == 2 + len(found)


def test_every_run_of_the_plan_is_one_that_the_backend_takes() -> None:
    wanted = [runs.parse(name) for job in asked() for name in job.runs]
    names = {run.name for run in wanted}
    for run in wanted:
        for late in (False, True):
            Config.from_options(run.compile_options(layers=6, late=late))
            head = "fp8" if run.name == "quartet2-head-fp8" else "bf16"
            assert run.compile_options(6)["policy"]["*lm_head*"] == head
        assert run.against in names


def test_a_part_of_the_plan() -> None:
    assert {job.folder for job in asked(("75M", "305M"))} == {"75M", "305M"}
    with pytest.raises(ValueError, match="--folders 76M: .* has 305M, 75M, 75M-second, branched-"):
        asked(("75M", "76M"))


def test_a_branch_lies_inside_of_the_run() -> None:
    args = Namespace(stems=None, out=Path("out"))

    def branch(at: float) -> Branch | None:
        return plan.branch(args, plan.Job("", [], [0], 1.0, "30m", at), 1200)

    assert branch(500) == branch(500 / 1200) == Branch(500, Path("out/stems"))
    for wrong in (0, 1200, 1500, 1e-9):
        with pytest.raises(ValueError, match="branches after step 1 to 1199, or a share"):
            branch(wrong)
