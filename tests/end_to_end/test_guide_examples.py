# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/guides run at tiny sizes, and print what their pages promise."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from q2compile.config import CONFIG_FILE_VARIABLE
from q2compile.report import announce
from tests.support.new_process import restart_clock
from tests.support.page_data import data_of

GUIDES = Path(__file__).resolve().parents[2] / "examples" / "guides"
PROGRAMS = sorted(path.stem for path in GUIDES.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"guide_{name}", GUIDES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def eager(tmp_path, monkeypatch, fresh_compiler) -> None:
    """In an empty folder, without Inductor."""
    restart_clock()
    config = tmp_path / "config.json"
    config.write_text('{"inner": "eager"}')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(config))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def first_line(monkeypatch, caplog) -> Callable[[], str]:
    """The log line of the first compiled graph."""
    monkeypatch.setattr(announce.First, "compiled", False)
    return lambda: next(text for text in caplog.messages if text.startswith("q2compile: "))


def losses(printed: str) -> list[float]:
    lines = [line for line in printed.splitlines() if line.startswith("step ") and "loss" in line]
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.parametrize("name", PROGRAMS)
def test_short_and_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A main() of less than 80 lines, and the first line of the docstring is the description."""
    path = GUIDES / f"{name}.py"
    tree = ast.parse(path.read_text())
    (main,) = [node for node in tree.body if getattr(node, "name", "") == "main"]
    assert main.end_lineno - main.lineno < 80
    with pytest.raises(SystemExit) as done:
        load(name).main(["--help"])
    assert done.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ast.get_docstring(tree).partition("\n")[0] in told


def test_explain_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder with a config.json, without weights."""
    program = load("explain_a_model")
    program.SMALL.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--layers", "1", "--tokens", "32"]
    arguments += ["--options", '{"policy": {"lm_head": "bf16"}}', "--page", "report.html"]
    assert program.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "7 of 8 matmuls with a weight taken" in printed
    assert "policy: 'lm_head' says bf16" in printed
    page = data_of(Path("report.html").read_text())
    assert "model.layers.0.mlp.down_proj" in {row["module"] for row in page["rows"]}


def test_policy_per_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("policy_per_module").main([]) == 0
    printed = capsys.readouterr().out
    chosen = dict(line.split(maxsplit=1) for line in printed.splitlines()[:7])
    assert chosen == {
        "layers.0.up": "policy: 'layers.0.*' says bf16",
        "layers.0.down": "quartet2 with bf16 dgrad",  # the last pattern that matches decides
        "layers.1.up": "quartet2",
        "layers.1.down": "quartet2 with bf16 dgrad",
        "layers.2.up": "quartet2",
        "layers.2.down": "quartet2 with bf16 dgrad",
        "head": "policy: 'head' says bf16",
    }
    first, last = losses(printed)
    assert last < 0.8 * first


def test_a_pattern_without_a_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="match no"):
        load("policy_per_module").main(["--policy", '{"layer.0.*": "bf16"}'])


def test_late_switch(capsys: pytest.CaptureFixture[str], first_line) -> None:
    assert load("late_switch").main(["--steps", "30", "--switch-at", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "step 16: the forward runs in BF16 from here on" in printed
    found = losses(printed)
    assert found == sorted(found, reverse=True) and len(found) == 4
    assert first_line() == "q2compile: 2 of 2 matmuls in NVFP4 (nvfp4)"


def test_telemetry_to_tensorboard(capsys: pytest.CaptureFixture[str], first_line) -> None:
    arguments = ["--to", "telemetry", "--steps", "5", "--every", "2", "--modules", "up"]
    assert load("telemetry_to_tensorboard").main(arguments) == 0
    printed = capsys.readouterr().out
    assert first_line() == "q2compile: 2 of 2 matmuls in NVFP4 (quartet2)"
    assert "records in telemetry; the last ones, from step 4" in printed
    assert "up fprop w" in printed and "down" not in printed
    assert len(Path("telemetry/rank0.csv").read_text().splitlines()) > 3
    installed = importlib.util.find_spec("tensorboard") is not None
    assert Path("telemetry/tensorboard").exists() == installed
    assert ("tensorboard --logdir telemetry" in printed) == installed


def test_compare_modules(capsys: pytest.CaptureFixture[str], first_line) -> None:
    assert load("compare_modules").main(["--picture", "ranking.svg"]) == 0
    printed = capsys.readouterr().out
    assert "relative error of the gradient of all parameters" in printed
    options = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert options["recipe"] == "quartet2"
    assert set(options["policy"].values()) == {"bf16", "fp8"}
    assert "loss with that policy" in printed
    assert "2 of 3 matmuls in FP8 and NVFP4 (fp8, quartet2)" in first_line()
    assert Path("ranking.svg").stat().st_size > 1000
