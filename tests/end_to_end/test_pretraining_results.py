# SPDX-License-Identifier: Apache-2.0
"""The comparisons of examples/pretraining: runs, gaps, tables, the queue over devices."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from pretraining import devices, page, results, runs  # noqa: E402
from pretraining.gaps import gaps, pair, pooled_spread  # noqa: E402
from pretraining.model import SIZES, build_model  # noqa: E402
from pretraining.record import Losses, Point, Result, without_folders  # noqa: E402
from pretraining.training import learning_rate_factor  # noqa: E402

from q2compile.config import Config, resolved_policy  # noqa: E402
from tests.support.markdown import tables  # noqa: E402


def result(name: str, seed: int, val_losses: list[float], **given: Any) -> Result:
    fields: dict[str, Any] = {
        "run": {"name": name},
        "setup": {"batch": 2, "seq": 4, "size": "tiny", "steps": 3},
        "seed": seed,
        "diverged_at": 0,
        "val_loss": sum(val_losses) / len(val_losses) if val_losses else math.nan,
        "val_losses": val_losses,
        "step_seconds": 0.5,
        "first_step_seconds": 9.0,
        "tokens_per_second": 16.0,
        "peak_bytes": 2**30,
        "provenance": {},
    }
    return Result(**{**fields, **given})


# ----------------------------------------------------------------------------------------- runs


def test_every_run_is_one_that_the_backend_takes() -> None:
    for name in runs.RUNS:
        run = runs.RUNS[name]
        for late in (False, True):
            Config.from_options(run.compile_options(layers=6, late=late))
        assert run.against in runs.RUNS
        assert run.late is None or run.compile_options(6, late=True) != run.compile_options(6)


def test_the_controls_change_what_their_names_say() -> None:
    def gemms(name: str) -> tuple[str, str, str]:
        options = runs.RUNS[name].compile_options(layers=6)
        return resolved_policy(Config.from_options(options)).default.texts()

    whole, bf16 = gemms("quartet2"), "bf16"
    assert gemms("quartet2-forward") == (whole[0], bf16, bf16)
    backward = gemms("quartet2-backward")
    # No codes are saved, so the backward quantizes the operand of the forward.
    assert backward == (bf16, *(text.replace("requantize>", "") for text in whole[1:]))
    assert gemms("quartet2-rtn") == (whole[0].replace("_46", ""), *whole[1:])
    assert gemms("quartet2-exact") == tuple(text.replace("_pow2", "") for text in whole)
    fixed = gemms("quartet2-fixed")
    assert fixed == tuple(text.replace("rht128", "rht128_fixed") for text in whole)
    policy = runs.RUNS["nvfp4-last-bf16"].compile_options(layers=6)["policy"]
    assert policy == {"*lm_head*": "bf16", "model.layers.5.*": "bf16"}


def test_runs_of_ones_own() -> None:
    own = runs.parse('mine={"options": {"recipe": "nvfp4"}, "backwards": true}')
    assert own.name == "mine" and own.backwards
    assert own.options == {"recipe": "nvfp4", "policy": {"*lm_head*": "bf16"}}
    assert runs.parse("quartet2") is runs.RUNS["quartet2"]
    for wrong in ("mine={", 'mine={"option": {}}'):
        with pytest.raises(ValueError, match="a run of your own is NAME="):
            runs.parse(wrong)


def test_30m_is_the_papers() -> None:
    """6 layers, width 640, 5 heads; 30M parameters in linear layers."""
    size = SIZES["30m"]
    assert (size.layers, size.hidden, size.heads, size.learning_rate) == (6, 640, 5, 1.2e-3)
    with torch.device("meta"):
        model = build_model(size, 4096, 512)
    linears = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert linears == size.parameters == 30_474_240


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0, abs=1e-12)


# ----------------------------------------------------------------------------------------- gaps


def test_gaps_are_paired_by_seed_and_by_batch() -> None:
    """Losses that differ by 1.0 from seed to seed and by 0.5 from batch to batch, alike in both
    runs."""
    bf16 = [result("bf16", s, [2.0 + s, 2.5 + s]) for s in (0, 1, 2)]
    # Differences by batch and seed: (.02, .04), (.03, .05), (.01, .03); by seed .03, .04, .02.
    added = [(0.02, 0.04), (0.03, 0.05), (0.01, 0.03)]
    run = [result("nvfp4", s, [2.0 + s + a, 2.5 + s + b]) for s, (a, b) in enumerate(added)]
    found = pair(run, bf16)
    assert found is not None
    assert found.differences == pytest.approx((0.03, 0.04, 0.02))
    assert found.mean == pytest.approx(0.03)
    assert math.sqrt(found.variance) == pytest.approx(0.01)
    # By batch, over the seeds: .02 and .04; their deviation .0141 over the root of two of them.
    assert found.validation_noise == pytest.approx(0.01)
    (gap,) = gaps([*bf16, *run], [("nvfp4", "bf16")]).values()
    assert gap.error == pytest.approx(math.sqrt(0.01**2 / 3 + 0.01**2))
    assert not gap.none and str(gap) == "+0.0300 ± 0.0115"


def test_the_spread_is_pooled_and_serves_a_run_of_one_seed() -> None:
    flat = [0.0, 0.0]
    every = [result("bf16", s, [1.0, 1.0]) for s in (0, 1, 2)]
    for name, losses in {"a": (1.01, 1.03), "b": (1.00, 1.02, 1.04), "c": (1.001,)}.items():
        every += [result(name, s, [x + loss for x in flat]) for s, loss in enumerate(losses)]
    found = gaps(every, [(name, "bf16") for name in "abc"])
    # Variances 2e-4 with one degree of freedom and 4e-4 with two.
    spread = math.sqrt((2e-4 + 2 * 4e-4) / 3)
    assert found["a", "bf16"].error == pytest.approx(spread / math.sqrt(2))
    assert found["b", "bf16"].error == pytest.approx(math.sqrt(4e-4 / 3))  # its own is larger
    assert found["c", "bf16"].error == pytest.approx(spread)
    assert found["c", "bf16"].none and str(found["c", "bf16"]) == "+0.0010 ± 0.0183 (none)"
    assert not found["a", "bf16"].none or abs(0.02) < 2 * spread / math.sqrt(2)


def test_one_seed_alone_has_no_error_to_show() -> None:
    every = [result("bf16", 0, [1.0, 1.0]), result("a", 0, [1.1, 1.1])]
    (gap,) = gaps(every, [("a", "bf16")]).values()
    assert gap.error is None and not gap.none and str(gap) == "+0.1000"
    assert pooled_spread([]) is None
    (given,) = gaps(every, [("a", "bf16")], spread=0.01).values()
    assert given.error == pytest.approx(0.01)


def test_what_diverged_has_no_gap() -> None:
    every = [result("bf16", 0, [1.0]), result("a", 0, [], diverged_at=7)]
    assert gaps(every, [("a", "bf16"), ("absent", "bf16")]) == {}
    assert "seed 0: NaN at step 7" in results.table(every)


# ---------------------------------------------------------------------------------- tables, curves


def test_the_table() -> None:
    every = [result("bf16", s, [1.0, 2.0]) for s in (0, 1)]
    every += [
        result("quartet2", s, [1.0 + 0.1 * (s + 1), 2.0 + 0.1 * (s + 1)], step_seconds=0.75)
        for s in (0, 1)
    ]
    header, bf16, quartet2, _ = results.table(every).splitlines()
    assert bf16.split() == ["bf16", "2", "1.5000", "0.5000", "1.00", "16", "1.00", "9.0"]
    # Differences .1 and .2: deviation .0707, over the root of two; no noise over the batches.
    assert quartet2.split() == [
        "quartet2",
        "2",
        "1.6500",
        "+0.1500",
        "±",
        "0.0500",
        "0.7500",
        "1.50",
        "16",
        "1.00",
        "9.0",
    ]
    # Other work of a CPU may come between the runs.
    on_cpu = [replace(run, setup={**run.setup, "device": "cpu"}) for run in every]
    _, *lines, last = results.table(on_cpu).splitlines()
    assert [line.split()[-4] for line in lines] == ["-", "-"] and "ratio" not in last


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert results.smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert results.smoothed([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])


def test_curves_have_a_band_over_the_seeds(tmp_path: Path) -> None:
    done = []
    for name, level in (("bf16", 3.0), ("quartet2", 3.2)):
        for seed in (0, 1):
            points = [Point(s, "train", level + seed / 2, 1.0, 0.1, 0.1) for s in range(1, 9)]
            points.append(Point(8, "val", level + seed * (name == "quartet2"), math.nan, 0.1, 0.1))
            done.append(results.Finished(result(name, seed, [level]), Losses(tmp_path, points)))
    results.write(done, tmp_path, "a title")
    for picture in ("losses", "gaps", "norms"):
        pixels = torch.from_numpy(image.imread(tmp_path / f"{picture}.png")[..., :3])
        assert pixels.shape == (750, 1200, 3)
        orange = torch.tensor([255, 127, 14]) / 255  # matplotlib's C1
        assert ((pixels - orange).abs().amax(-1) < 0.02).sum() > 100, picture
    pixels = torch.from_numpy(image.imread(tmp_path / "losses.png")[..., :3])
    band = 0.2 * torch.tensor([255, 127, 14]) / 255 + 0.8  # a fifth of it on white
    assert ((pixels - band).abs().amax(-1) < 0.02).sum() > 5000
    assert (tmp_path / "table.txt").read_text().startswith("recipe")


# ------------------------------------------------------------------------------------------- page


def recorded(folder: Path, name: str, seed: int, val_losses: list[float], **given: Any) -> None:
    """A run as `Comparison` leaves it."""
    run = {**runs.RUNS[name].__dict__, "name": name} if name in runs.RUNS else {"name": name}
    setup = {"batch": 2, "seq": 4, "size": "30m", "steps": 3, "compile_options": {"mode": None}}
    data = {"tokens": 75_000_000, "epochs": 0.5, "corpus": "abc", "name": "a corpus"}
    provenance = {"data": data, "device": "a GPU", "versions": {"torch": "2.11.0"}}
    provenance |= {"date": "2026-11-22", "command": "pretrain.py train"}
    of_run = {"run": run, "setup": setup, "provenance": provenance}
    place = results.run_folder(folder, name, seed)
    result(name, seed, val_losses, **{**of_run, **given}).write(place / "result.json")
    Losses.start(place / "losses.csv")


def test_the_page_is_made_of_gaps_json(tmp_path: Path) -> None:
    folder, into = tmp_path / "table" / "75M", tmp_path / "results"
    for seed in (0, 1):
        recorded(folder, "bf16", seed, [1.0, 2.0])
        added = 0.02 + 0.002 * seed
        recorded(folder, "quartet2", seed, [1 + added, 2 + added], step_seconds=0.75)
    recorded(folder, "quartet2-exact", 0, [1.0211, 2.0211], peak_bytes=2**31)
    recorded(folder, "nvfp4", 0, [], diverged_at=7)
    page.write(into, tmp_path / "table")
    rows = {(r["run"], r["seed"]): r for r in json.loads((into / "gaps.json").read_text())}
    row = rows["quartet2", 1]
    assert (row["gap"], row["step_ratio"], row["peak_ratio"]) == (0.022, 1.5, 1.0)
    assert (row["recipe"], row["corpus"], row["tokens"]) == ("quartet2", "abc", 75_000_000)
    assert rows["nvfp4", 0]["val_loss"] is None and rows["nvfp4", 0]["gap"] is None
    assert rows["quartet2-exact", 0]["options"]["global_scale"] == "exact"
    tables = (into / "tables.md").read_text().splitlines()
    # One pair with two seeds, .020 and .022: deviation .0014, over the root of the seeds.
    assert "| `quartet2` | 2 | 1.5210 | +0.0210 ± 0.0010 | 1.50 | 1.00 |  |" in tables
    (control,) = [line for line in tables if line.startswith("| `quartet2-exact` | 1 | 1.5211 |")]
    assert " | +0.0211 ± 0.0014 | 1.00 | 2.00 | " in control
    # The difference is that of the seed that both have.
    assert control.endswith(" | +0.0011 ± 0.0014 (none) to `quartet2` |")
    assert "| `nvfp4` | 1 |  | NaN at step 7 (seed 0) | 1.00 | 1.00 |  |" in tables
    before = (into / "tables.md").read_text()
    page.write(into, None)
    assert (into / "tables.md").read_text() == before


def test_times_beside_other_work_are_left_out(tmp_path: Path) -> None:
    """BF16 in .5 s alone and .9 s beside other work, quartet2 in .75 s and 1.5 s."""
    folder, into = tmp_path / "table" / "75M", tmp_path / "results"
    seconds = {"bf16": (0.5, 0.9), "quartet2": (0.75, 1.5)}
    for name, of_seeds in seconds.items():
        for seed, of_one in enumerate(of_seeds):
            recorded(folder, name, seed, [1.0, 2.0], step_seconds=of_one)
    page.write(into, tmp_path / "table", ["75M/bf16-seed1", "75M/quartet2-seed1"])
    rows = {(r["run"], r["seed"]): r for r in json.loads((into / "gaps.json").read_text())}
    assert rows["quartet2", 0]["step_ratio"] == 1.5  # .7 would be the median of both of BF16's
    times = ("step_seconds", "step_ratio", "tokens_per_second", "first_step_seconds")
    for name in seconds:
        assert [rows[name, 1][key] for key in times] == [None] * 4
        assert rows[name, 1]["peak_ratio"] == 1.0 and rows[name, 1]["gap"] == 0.0
    tables = (into / "tables.md").read_text().splitlines()
    assert "| `quartet2` | 2 | 1.5000 | +0.0000 ± 0.0000 | 1.50 | 1.00 |" in tables
    page.write(into, tmp_path / "table", [f"75M/{n}-seed{s}" for n in seconds for s in (0, 1)])
    tables = (into / "tables.md").read_text().splitlines()
    assert "| `quartet2` | 2 | 1.5000 | +0.0000 ± 0.0000 |  | 1.00 |" in tables
    with pytest.raises(ValueError, match="75M/bf16-seed2: no run of .* that ended; those are 75M/"):
        page.write(into, tmp_path / "table", ["75M/bf16-seed2"])
    with pytest.raises(ValueError, match="give that as --of"):
        page.write(into, None, ["75M/bf16-seed1"])


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("train --corpus corpus --out runs/a", "train --corpus corpus --out runs/a"),
        ("train --corpus /a/b/corpus --out /a/b/runs/c", "train --corpus corpus --out runs/c"),
        ("train --corpus=/a/corpus/ --plan b/c.toml", "train --corpus=corpus --plan b/c.toml"),
        ("train --out '/a/my runs' --lr 1e-3", "train --out 'my runs' --lr 1e-3"),
    ],
)
def test_a_command_is_shown_without_folders_of_its_machine(typed: str, shown: str) -> None:
    assert without_folders(typed) == shown


def test_corpora_stand_apart(tmp_path: Path) -> None:
    """Two tables of the same size and tokens. Gap and spread of one use no runs of the other, and a
    table that is written anew replaces only its own rows."""
    into = tmp_path / "results"
    for corpus, gap in (("abc", 0.02), ("def", 0.5), ("def", 0.04)):
        data = {"tokens": 75_000_000, "epochs": 0.5, "corpus": corpus, "name": f"text {corpus}"}
        provenance = {"data": data, "device": "a GPU", "versions": {"torch": "2.11.0"}}
        provenance |= {"date": "2026-11-22", "command": "pretrain.py train"}
        folder = tmp_path / corpus / f"75M-{corpus}"
        for seed in (0, 1):
            recorded(folder, "bf16", seed, [1.0, 2.0], provenance=provenance)
            losses = [1 + gap * (1 + seed), 2 + gap * (1 + seed)]
            recorded(folder, "quartet2", seed, losses, provenance=provenance)
        page.write(into, tmp_path / corpus)
    rows = json.loads((into / "gaps.json").read_text())
    assert [row["corpus"] for row in rows] == ["abc"] * 4 + ["def"] * 4
    first, second = (into / "tables.md").read_text().split("## text def, def")
    # .02 and .04; .04 and .08: over the root of two, their deviation is half of their difference.
    assert "| `quartet2` | 2 | 1.5300 | +0.0300 ± 0.0100 | 1.00 | 1.00 |" in first
    assert "| `quartet2` | 2 | 1.5600 | +0.0600 ± 0.0200 | 1.00 | 1.00 |" in second


def test_more_seeds_are_added(tmp_path: Path) -> None:
    """Rows of another folder, of the same comparison and corpus, join those that are there."""
    into = tmp_path / "results"
    for seed, gap in ((0, 0.02), (1, 0.04)):
        folder = tmp_path / f"runs{seed}" / "75M"
        recorded(folder, "bf16", seed, [1.0, 2.0])
        recorded(folder, "quartet2", seed, [1 + gap, 2 + gap])
        page.write(into, tmp_path / f"runs{seed}")
    rows = json.loads((into / "gaps.json").read_text())
    assert [(r["run"], r["seed"]) for r in rows] == [
        ("bf16", 0),
        ("quartet2", 0),
        ("bf16", 1),
        ("quartet2", 1),
    ]
    # .02 and .04: their deviation over the root of two is half of their difference.
    tables = (into / "tables.md").read_text()
    assert "| `quartet2` | 2 | 1.5300 | +0.0300 ± 0.0100 | 1.00 | 1.00 |" in tables


@pytest.mark.parametrize("gaps_file", list((EXAMPLES / "pretraining").glob("results/gaps.json")))
def test_the_recorded_page_is_that_of_the_recorded_gaps(gaps_file: Path) -> None:
    rows = json.loads(gaps_file.read_text())
    assert gaps_file.with_name("tables.md").read_text() == page.page(rows)
    wanted = {"run", "recipe", "options", "size", "tokens", "seed", "val_loss", "gap", "step_ratio"}
    wanted |= {"peak_ratio", "versions", "date", "device", "command", "corpus"}
    for row in rows:
        assert wanted <= set(row)
        assert row["command"] == without_folders(row["command"])
    for name in ("stability", "stability-cpu", "operands"):
        facts = json.loads(gaps_file.with_name(f"{name}.json").read_text())
        assert {"date", "device", "versions"} <= set(facts)
        for command in facts["commands"] if "commands" in facts else [facts["command"]]:
            subcommand = name.removesuffix("-cpu")
            assert f"pretrain.py {subcommand} " in command or "--oracle" in command
            assert command == without_folders(command)


def test_the_readme_has_the_figures_that_were_recorded() -> None:
    """The tables of operands and of stability, cell by cell."""
    page = (EXAMPLES / "pretraining" / "README.md").read_text()
    folder = EXAMPLES / "pretraining" / "results"

    def row(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    def of(values: dict[str, float], digits: int) -> list[str]:
        return [f"{value:.{digits}f}".removeprefix("0") for value in values.values()]

    for errors in json.loads((folder / "operands.json").read_text())["recipes"]:
        name = f"`{errors['run']}`"
        assert row(name, *of(errors["operands"], 4)) in page
        for operand, error in errors["operands"].items():  # "within 3%"
            assert error == pytest.approx(errors["normal"][operand], rel=0.03)
        assert row(name, *of(errors["gradients"], 3)) in page
    has_stability(page, json.loads((folder / "stability.json").read_text()), row)
    losses = json.loads((folder / "stability-cpu.json").read_text())["val_losses"]
    gap = losses["quartet2"]["compiled"] - losses["bf16"]["compiled"]
    assert f"quartet2's gap is {gap:+.4f} compiled".replace("+0.", "+.") in page


def has_stability(page: str, stability: dict[str, Any], row: Callable[..., str]) -> None:
    """Asserts that a page has the figures of a run of `stability`."""
    bf16, quartet2 = stability["val_losses"].values()
    bf16_part, quartet2_part = page.split(f"| BF16, {bf16['compiled']:.4f}: ")[1].split(
        f"| `quartet2`, {quartet2['compiled']:.4f}: "
    )
    names = {"rounding": "other random bits", "oracle": "the oracle"}
    for found in stability["differences"]:
        part = bf16_part if found["run"] == "bf16" else quartet2_part
        variant = names.get(found["variant"], found["variant"])
        if found["first"]:
            numbers = [f"{found[key]:+.4f}".replace("0.", ".") for key in ("mean_loss", "val_loss")]
            assert row(variant, f"from step {found['first']}", *numbers) in part
        else:
            same, differs = part.splitlines()[0].split("|")[:2]
            assert variant in same and differs == " in no step: the same bits "
    for variant in ("compiled", "eager", "rounding", "oracle"):
        assert f"{quartet2[variant] - bf16[variant]:+.4f}".replace("0.", ".") in quartet2_part


def test_the_page_of_measurements_has_the_gaps_of_its_runs() -> None:
    """Every row of the page of measurements that has a gap, against the row of its run."""
    parts = re.split(
        r"^### ", (EXAMPLES / "pretraining/results/branched.md").read_text(), flags=re.MULTILINE
    )[1:]
    found = {
        part.partition("\n")[0]: {
            cells["run"].strip("`"): cells for cells in tables(part) if "gap to BF16" in cells
        }
        for part in parts
    }
    (small,) = (own for title, own in found.items() if "after step 500 of 1200" in title)
    (large,) = (own for title, own in found.items() if title.startswith("Llama 100m"))
    where = {"gap, 30M": (small, ""), "gap": (small, ""), "gap, 100M": (large, "")}
    where |= {f"{part} alone": (small, f"-{part}") for part in ("forward", "backward")}
    checked = 0
    for cells in tables((EXAMPLES / "guides/measured.md").read_text()):
        name = cells.get("recipe", cells.get("run", "")).strip("`")
        name = name.replace("quartet2_search", "quartet2-search")
        for title, cell in cells.items():
            if " ± " in cell:
                own, end = where[title]
                assert own[name + end]["gap to BF16"] == cell, (name, title)
            checked += " ± " in cell
    assert checked > 30


# ----------------------------------------------------------------------------------------- devices

SAY = "import os, sys; open(sys.argv[1], 'a').write(sys.argv[3] + ' ' + os.environ.get("
SAY += "'CUDA_VISIBLE_DEVICES', '-') + '\\n'); sys.exit(int(sys.argv[1][-1]))"


def test_each_command_runs_once_on_a_device_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    files = [tmp_path / f"{i}-{status}" for i, status in enumerate([0, 3, 0])]
    commands = [[sys.executable, "-c", SAY, str(file)] for file in files]
    calls: list[int] = []
    statuses = devices.run_all(
        commands, ["cuda:0", "cuda:1"], time.time() + 60, lambda: calls.append(1)
    )
    assert statuses == {0: 0, 1: 3, 2: 0} and calls
    said = [file.read_text() for file in files]
    assert sorted(said[:2]) == ["cuda 4\n", "cuda 7\n"]  # each sees its own as the only one
    assert said[2] in said[:2]


def test_after_the_deadline_nothing_is_started_and_the_rest_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "GRACE", 0.2)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    start = time.time()
    statuses = devices.run_all([sleep] * 3, ["cpu", "cpu"], start + 0.3, lambda: None)
    assert statuses == {0: devices.STOPPED, 1: devices.STOPPED, 2: devices.STOPPED}
    assert time.time() - start < 60


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = result("bf16", 1, [1.25, 1.5])
    written.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == written
    assert json.loads((tmp_path / "result.json").read_text())["run"]["name"] == "bf16"
    assert list(tmp_path.iterdir()) == [tmp_path / "result.json"]
