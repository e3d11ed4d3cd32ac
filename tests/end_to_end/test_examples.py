# SPDX-License-Identifier: Apache-2.0
"""The examples run as a user runs them, and their results are right."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib import image

from tests.support import forked
from tests.support.markdown import tables
from tests.support.page_data import data_of

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "train_llama.py"
STEPS = 30
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))  # as when it is run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_llama() -> ModuleType:
    return load(TRAIN)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with something to learn: 600 lines that differ in two numbers, and a file of noise."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(3):
        lines = [
            f"row {i}: the square of {i} is {i * i}." for i in range(200 * part, 200 * part + 200)
        ]
        (folder / f"part{part}.txt").write_text("\n".join(lines))
    (folder / "not_text.bin").write_bytes(bytes(range(128, 256)))
    return folder


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run with both recipes wrote; its output is in stdout.txt."""
    out = tmp_path_factory.mktemp("trained")
    command = ["--recipes", "bf16,quartet2", "--size", "tiny"]
    command += ["--steps", str(STEPS), "--batch", "4", "--seq", "64", "--vocab", "256"]
    command += ["--eval-every", "15", "--eval-batches", "2", "--device", "cpu"]
    command += ["--compile-options", '{"inner": "eager"}']
    done = forked.run_file(TRAIN, *command, "--data", str(corpus), "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    (out / "stdout.txt").write_text(done.stdout)
    return out


def losses(folder: Path, recipe: str, split: str) -> dict[int, float]:
    """step -> loss."""
    with open(folder / f"{recipe}-seed0" / "losses.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    return {int(row["step"]): float(row["loss"]) for row in rows}


@pytest.mark.parametrize("recipe", ["bf16", "quartet2"])
def test_the_loss_falls(trained: Path, recipe: str) -> None:
    train, val = losses(trained, recipe, "train"), losses(trained, recipe, "val")
    assert list(train) == list(range(1, STEPS + 1))
    assert list(val) == [15, STEPS]
    assert train[1] == pytest.approx(5.545, abs=0.15)  # ln 256: an untrained model
    assert val[STEPS] < val[15] < train[1]
    assert val[STEPS] < 4.0


def test_the_recipes_start_alike_and_then_differ(trained: Path) -> None:
    bf16, quartet2 = (losses(trained, recipe, "train") for recipe in ("bf16", "quartet2"))
    # Same weights, same batch: the first losses differ by the forward's quantization alone.
    assert 0 < abs(bf16[1] - quartet2[1]) < 0.02
    assert bf16 != quartet2
    gap = losses(trained, "quartet2", "val")[STEPS] - losses(trained, "bf16", "val")[STEPS]
    assert abs(gap) < 0.25


def test_the_curves_of_both_recipes_are_drawn(trained: Path) -> None:
    """Where the losses differ by less than 0.005, the second curve covers the first, which then
    appears only in the legend: a line of 111 pixels. The legend names only drawn curves. A curve
    that is not covered has 2,800 pixels."""
    pixels = torch.from_numpy(image.imread(trained / "losses.png")[..., :3])
    assert pixels.shape == (750, 1200, 3)
    seen = []
    for color in ("#1f77b4", "#ff7f0e"):  # matplotlib's C0 and C1
        rgb = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        seen.append(int(((pixels - rgb).abs().amax(-1) < 0.02).sum()))
    assert min(seen) > 100 and max(seen) > 1000, seen


def test_the_report_names_every_linear(trained: Path) -> None:
    folder = trained / "graphs" / "quartet2"
    rows = {row["module"]: row for row in json.loads((folder / "report.json").read_text())}
    taken = {name.rsplit(".", 1)[-1] for name, row in rows.items() if row["taken"]}
    assert taken == set(PROJECTIONS)
    assert rows["model.layers.0.mlp.down_proj"]["shape"] == [4 * 64, 64, 128]
    assert not rows["lm_head"]["taken"]
    assert "*lm_head*" in rows["lm_head"]["why"]
    page = json.dumps(data_of((folder / "report.html").read_text()))
    assert all(name in page for name in PROJECTIONS)
    assert (folder / "graph_0" / "2_forward.txt").read_text().count("q2.gemm") == len(PROJECTIONS)
    assert not (trained / "graphs" / "bf16").exists()


def test_the_summary_says_where_to_look(trained: Path) -> None:
    printed = (trained / "stdout.txt").read_text()
    for recipe in ("bf16", "quartet2"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{recipe} ")][:1]
        assert f"{losses(trained, recipe, 'val')[STEPS]:.4f}" in line
    for name, count in {"losses.csv": 2, "losses.png": 1, "report.html": 1}.items():
        paths = [word for word in printed.split() if word.endswith(name)]
        assert len(paths) == count and all(Path(path).is_file() for path in paths)


def test_a_wrong_recipe_is_refused_before_any_work(
    train_llama: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train_llama.main(["--recipes", "bf16,quartett2", "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert "quartett2" in printed.err and "quartet2" in printed.err
    assert printed.out == "" and not out.exists()


def test_missing_and_short_data_are_refused(
    train_llama: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_llama.main(["--data", str(tmp_path / "absent")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("too little")
    assert train_llama.main(["--data", str(tmp_path / "short.txt")]) == 2
    assert "give more text" in capsys.readouterr().err
    assert train_llama.main(["--data", str(tmp_path / "folder_without_text")]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", ","], "name at least one"),
        (["--steps", "0"], "0 is not positive"),
        (["--vocab", "100"], "allowed: 256 or more"),
        (["--compile-options", "{strict}"], "not JSON"),
        (["--compile-options", "[1]"], "not a JSON object"),
    ],
)
def test_wrong_arguments_are_refused(
    train_llama: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        train_llama.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_held_out_text_is_not_trained_on(train_llama: ModuleType, corpus: Path) -> None:
    documents = train_llama.read_documents(corpus)
    assert len(documents) == 3  # the noise is not text
    train, val = train_llama.split_text(documents, seed=0)
    assert len(val) == pytest.approx(0.05 * (len(train) + len(val)), rel=0.01)
    lines = [line for line in val.splitlines()[1:] if line]
    assert len(lines) > 10 and not any(line in train for line in lines)
    assert (train, val) == train_llama.split_text(documents, seed=0)
    assert val != train_llama.split_text(documents, seed=1)[1]


def test_tokens_are_the_text(train_llama: ModuleType, corpus: Path) -> None:
    text = train_llama.read_documents(corpus)[0]
    counts = []
    for vocabulary in (256, 300):
        tokenizer = train_llama.train_tokenizer([text], vocabulary)
        counts.append(sum(len(part) for part in train_llama.encode(tokenizer, [text])))
    assert counts[0] == len(text.encode())  # 256 entries: one token a byte
    assert counts[1] < counts[0] / 2


def test_batches_are_windows_of_the_tokens(train_llama: ModuleType) -> None:
    tokens = torch.arange(200)
    batches = train_llama.draw_batches(tokens, count=500, batch=8, seq=16, seed=3)
    assert batches.shape == (500, 8, 16)
    assert torch.equal(batches - batches[..., :1], torch.arange(16).expand(500, 8, 16))
    assert batches.max() == 199 and batches.min() == 0
    assert torch.equal(batches, train_llama.draw_batches(tokens, 500, 8, 16, seed=3))
    assert not torch.equal(batches, train_llama.draw_batches(tokens, 500, 8, 16, seed=4))


def test_options_given_to_the_backend(
    train_llama: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "options.toml"
    config.write_text('[policy]\n"*.down_proj" = "bf16"\n')
    monkeypatch.setenv("Q2COMPILE_CONFIG", "")  # put back as it was after the test
    args = Namespace(recipes=["quartet2"], size="tiny", config=None, compile_options={})
    (run,) = train_llama.recipes(args)
    assert run.options == {"recipe": "quartet2", "policy": {"*lm_head*": "bf16"}}
    args.config = config
    (run,) = train_llama.recipes(args)
    assert run.options == {"recipe": "quartet2"}  # the file's policy is not overridden


@pytest.fixture
def cpu(monkeypatch) -> ModuleType:
    """examples/benchmarks/cpu.py"""
    folder = ROOT / "examples" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return load(folder / "cpu.py")


def test_benchmark_ratios(cpu) -> None:
    samples = {
        "bf16": [cpu.Sample(1.0, 10.0), cpu.Sample(2.0, 4.0), cpu.Sample(3.0, 6.0)],
        "quartet2": [cpu.Sample(6.0, 15.0), cpu.Sample(5.0, 5.0), cpu.Sample(9.0, 7.0)],
    }
    rows = {row["name"]: row for row in cpu.ratios(samples)}
    assert rows["training step"]["ratio"] == 3.0
    assert rows["compile, cold caches"]["ratio"] == 1.5
    assert rows["compile, warm caches"]["seconds"] == {"bf16": 5.0, "quartet2": 6.0}


def test_slopes_of_the_first_step(cpu) -> None:
    found = {
        ("bf16", 2): {"lowering": 1.0, "scheduler": 1.0},
        ("bf16", 4): {"lowering": 2.0, "scheduler": 2.0},
        ("quartet2", 2): {"lowering": 1.5, "scheduler": 1.0, "q2compile: rewrite": 0.5},
        ("quartet2", 4): {"lowering": 3.0, "scheduler": 2.0, "q2compile: rewrite": 1.0},
    }
    rows = {row["name"]: row for row in cpu.slopes(found, [2, 4])}
    assert (rows["all"]["bf16"], rows["all"]["quartet2"], rows["all"]["ratio"]) == (1.0, 1.5, 1.5)
    assert rows["lowering"]["ratio"] == 1.5 and rows["scheduler"]["ratio"] == 1.0
    assert rows["q2compile: rewrite"] == {
        "name": "q2compile: rewrite",
        "unit": "seconds of a core for one layer more",
        "bf16": 0.0,
        "quartet2": 0.25,
        "ratio": None,
    }


def test_phases_of_the_first_step_are_without_those_inside(cpu, monkeypatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(cpu, "time", Namespace(process_time=lambda: next(now)))
    clock = cpu.Clock()
    with clock.of("outer"), clock.of("inner"):
        pass
    assert clock.seconds == {"outer": 1.0 + 4.0, "inner": 2.0}


def test_rows_replace_those_of_their_name_shape_and_mode(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    rows = load(ROOT / "examples" / "benchmarks" / "rows.py")
    benchmark = rows.Benchmark(
        lambda args: [
            {"name": "a", "shape": [args.size, 4], "ratio": 2.0, "unit": "copies"},
            {"name": "b", "mode": "reduce-overhead", "ratio": 3.0, "unit": "copies"},
        ],
        "made.json",
        ("size",),
        "cpu",
    )
    kept = [{"name": "a", "shape": [8, 4]}, {"name": "b", "mode": "default"}]
    old = [{"name": "a", "shape": [16, 4]}, {"name": "b", "mode": "reduce-overhead"}]
    (tmp_path / "made.json").write_text(json.dumps(kept + old))
    parser = ArgumentParser()
    parser.add_argument("--size", type=int, default=8)
    words = ["--only", "mine", "--size", "16", "--out", str(tmp_path)]
    rows.run("script", "What it does.", {"mine": benchmark}, parser, words)
    *others, a, b = json.loads((tmp_path / "made.json").read_text())
    assert others == kept and (a["ratio"], b["ratio"]) == (2.0, 3.0)
    command = "python examples/benchmarks/script.py --only mine --size 16"
    assert a["command"] == b["command"] == command
    assert {"device", "versions", "date"} <= set(a)


def test_a_benchmark_that_does_not_exist(capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    rows = load(ROOT / "examples" / "benchmarks" / "rows.py")
    with pytest.raises(SystemExit):
        rows.run("script", "What it does.", {}, argv=["--only", "mine"])
    assert "--only mine: give names of" in capsys.readouterr().err


def test_what_is_alive_at_the_peak_of_a_trace(tmp_path) -> None:
    """Memory counts for the line of generated code that allocated it, also through another
    function. Memory from before is freed. A block whose free was only requested is alive."""
    alive = load(ROOT / "examples" / "benchmarks" / "alive.py")
    code = tmp_path / "torchinductor_me.py"
    code.write_text("buf0 = empty_strided_cuda((4, ))\nq2_site_0(buf0)\n")
    generated = [{"filename": str(code), "name": "call", "line": n} for n in (1, 2)]
    inner = {"filename": "calls.py", "name": "empty", "line": 7}

    def event(action, addr, size, *frames):
        return {"action": action, "addr": addr, "size": size, "frames": frames}

    trace = [
        event("alloc", 1, 100, generated[0]),
        event("free_requested", 1, 100),
        event("alloc", 2, 50, inner, generated[1]),
        event("alloc", 3, 25, inner, generated[1]),
        event("free_completed", 1, 100),
        event("free_completed", 9, 500),
        event("alloc", 4, 60),
    ]
    assert alive.lines(trace) == {
        "call:1 buf0 = empty_strided_cuda((4, ))": 100,
        "call:2 q2_site_0(buf0)": 75,
    }


def test_recorded_results_say_where_they_come_from() -> None:
    results = sorted((ROOT / "examples" / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        for row in json.loads(path.read_text()):
            assert {"name", "date", "command"} <= set(row), path.name
            assert "device" in row or "gpu" in row, path.name
            assert {"ratio", "unit", "versions"} <= set(row), path.name


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Title of a column -> what a row of `results/` has for it."""
    found = {"ratio": row["ratio"], "peak": row.get("peak_ratio"), "date": row["date"][5:]}
    value, bf16 = row.get("value"), row.get("bf16")
    if "seconds" in row and "quartet2" in row["seconds"]:
        value, bf16 = row["seconds"]["quartet2"], row["seconds"]["bf16"]
    for unit in ("ms", "GiB", "s"):
        found |= {unit: value, f"BF16, {unit}": bf16}
    for key, title in (("ms", "ms"), ("mb", "MB"), ("peak_mb", "peak, MB")):
        if key in row:
            found |= {f"bf16 gathers, {title.split(',')[0]}": row[key][0], title: row[key][1]}
    return found


# Pages of figures, and what the end of a column's title adds to the names of its rows.
FIGURES = ("guides/measured.md", "benchmarks/README.md")
MODELS = ("llama", "8b", "30m_graphs", "30m_8x512", "moe")  # of passes.py
ADDED = {"bf16": "_bf16", "CUDA graphs": ", CUDA graphs", "cached": "_cached"}
ADDED |= {model: f", {model}" for model in MODELS}


def test_the_tables_of_figures_say_what_was_recorded() -> None:
    """Every row in `results/` is in one table of the pages of figures, once, and the other way
    round; pipes.json has counters of a GPU, which no page repeats. A cell in a column "ratio", or
    one named like the row's shape, rounds its ratio; cells in other columns that `figures` knows
    round those."""
    shown: dict[tuple[str, str], str] = {}
    beside: list[tuple[str, str, str]] = []
    for page in FIGURES:
        for cells in tables((ROOT / "examples" / page).read_text()):
            if "row" not in cells:
                continue
            name = cells["row"].strip("`")
            for title, cell in cells.items():
                title, _, end = (
                    title.partition(", ") if title.endswith((*ADDED,)) else (title, "", "")
                )
                key = (name + ADDED.get(end, ""), title)
                if cell and (title == "ratio" or re.fullmatch(r"\d+ x \d+", title)):
                    assert key not in shown, f"{key} is shown twice"
                    shown[key] = cell
                elif cell:
                    beside.append((name, title, cell))
    recorded, rows = {}, {}
    results = ROOT / "examples" / "benchmarks" / "results"
    for path in sorted(set(results.glob("*.json")) - {results / "pipes.json"}):
        for row in json.loads(path.read_text()):
            name = row["name"] + (
                ", CUDA graphs" if row.get("mode", "default") != "default" else ""
            )
            several = path.name in ("kernels.json", "fusion.json") and "shape" in row
            title = " x ".join(map(str, row["shape"])) if several else "ratio"
            if name.startswith("host_"):
                title = "ratio"
            rows[name] = figures(row)
            if row["name"] != "copy" and row["ratio"] is not None:
                recorded[name, title] = row["ratio"]
    assert set(shown) == set(recorded)
    for key, ratio in recorded.items():
        assert rounds(shown[key], ratio), key
    for name, title, cell in beside:
        figure = rows.get(name, {}).get(title)
        if title == "date":
            assert cell == figure, (name, title)
        elif figure is not None:
            assert rounds(cell, figure), (name, title, cell)


def rounds(cell: str, figure: float) -> bool:
    """Whether a cell is the figure, with the digits that it has."""
    digits = len(cell.partition(".")[2])
    return abs(float(cell) - figure) <= 0.5 * 10**-digits + 1e-9
