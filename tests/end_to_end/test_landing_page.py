# SPDX-License-Identifier: Apache-2.0
"""The README: its picture and its figures are those of the committed results. Where to write to:
one address, and templates of issues."""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from q2compile.tools import cli
from tests.support.markdown import blocks
from tests.support.tracked import tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def script(name: str) -> ModuleType:
    """A module of examples/benchmarks."""
    sys.path.insert(0, str(EXAMPLES / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES / "benchmarks"))


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    return script("recipes_picture")


def row(file: str, name: str) -> dict[str, float]:
    rows = json.loads((EXAMPLES / "benchmarks" / "results" / file).read_text())
    (found,) = (row for row in rows if row["name"] == name)
    return found


def test_the_picture_is_drawn_from_the_results(picture) -> None:
    """examples/guides/pictures/recipes.svg is written by examples/benchmarks/recipes_picture.py."""
    text = picture.PICTURE.read_text(encoding="utf-8")
    assert text == picture.svg()
    assert "prefers-color-scheme: dark" in text
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name in picture.RECIPES)


def test_time_to_quality_is_computed_from_the_results() -> None:
    """Its table, and which runs the picture names, follow from gaps and the cost model."""
    made = script("time_to_quality")
    table = made.table()
    assert "\n".join(table) in (EXAMPLES / "guides" / "measured.md").read_text(encoding="utf-8")
    found = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in table[2:])}
    low, high = map(float, found["quartet2"][4].split("-"))
    later = [float(found[run][4].split("-")[0]) for run in ("quartet2-late-9", "quartet2-late")]
    assert 0.4 < low < later[0] < later[1] < 1 and low < high
    assert float(found["bf16"][4]) == 1.0
    times, losses = (
        {"a": 1.0, "b": 0.5, "c": 0.7, "d": 0.6},
        {"a": 0.0, "b": 3.0, "c": 1.0, "d": 1.0},
    )
    assert made.best(times, losses) == ["b", "d", "a"]


def test_figures_of_the_readme_are_those_recorded(picture) -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    gaps = picture.loss_gaps()
    of_fp8 = f"`quartet2_fp8` {gaps['quartet2_fp8']}, `fp8` {str(gaps['fp8']).split()[0]}"
    pairs = [gaps[name].seeds for name in ("quartet2", "quartet2_fp8", "fp8")]
    assert f"`quartet2` ends {gaps['quartet2']} nats per token above BF16, {of_fp8}" in page
    assert "{}, {} and {} pairs".format(*pairs) in page
    assert f"{row('models.json', 'saved_bits')['ratio']} bits per element instead of 16" in page
    peak = row("steps.json", "llama_8b_peak_memory")
    assert f"falls from {peak['bf16']:.2f} to {peak['value']:.2f} GiB" in page
    step, mixed = (row("steps.json", f"{name}_8b_step") for name in ("fp8", "quartet2_fp8"))
    assert f"takes {step['ratio']:.2f} of its time in BF16 on an H200" in page
    assert f"takes {step['value']:.1f} ms under `fp8` and {step['bf16']:.1f} ms in BF16" in page
    in_4_bits = row("steps.json", "mxfp4_2d_8b_step")["ratio"]
    assert f"and {in_4_bits:.2f} with `mxfp4_2d`, in 4 bits" in page
    emulated = row("steps.json", "llama_8b_step")["ratio"]
    assert f"`quartet2_fp8` takes {mixed['ratio']:.2f} of BF16's time there" in page
    assert f"a Hopper emulates, {emulated:.2f}" in page


def test_the_address_is_in_one_file() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    address = urls["Repository"]
    assert urls["Issues"] == f"{address}/issues"
    texts = (path for path in tracked(ROOT) if path.suffix in (".md", ".py", ".toml", ".cff"))
    assert [path.name for path in texts if address in path.read_text()] == ["pyproject.toml"]


@pytest.mark.parametrize("name", ["bench_report", "fault"])
def test_a_template_of_issues(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.md").read_text(encoding="utf-8")
    assert re.match(r"---\nname: .+\nabout: .+\nlabels: \w+\n---\n", page)
    (block,) = blocks(page)
    program, *words = block.text.split()
    assert program == "q2compile"
    with pytest.raises(SystemExit) as done:
        cli.main([*words, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
