# SPDX-License-Identifier: Apache-2.0
"""The README: its picture and its figures are those of the committed results. Where to write to:
one address, and templates of issues."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES / "benchmarks"))
    try:
        import recipes_picture
    finally:
        sys.path.remove(str(EXAMPLES / "benchmarks"))
    return recipes_picture


def row(file: str, name: str) -> dict[str, float]:
    rows = json.loads((EXAMPLES / "benchmarks" / "results" / file).read_text())
    (found,) = (row for row in rows if row["name"] == name)
    return found


def fp8_row(recipe: str) -> tuple[str, str, str]:
    """Ratio, milliseconds, BF16's milliseconds: all tables that have the row agree."""
    cells = rf"^\| `{recipe}` \| (0\.\d+) \| ([\d.]+) \| ([\d.]+) \|"
    pages = [path.read_text() for path in tracked(ROOT) if path.suffix == ".md"]
    (found,) = {match for page in pages for match in re.findall(cells, page, re.MULTILINE)}
    return found


def test_the_picture_is_drawn_from_the_results(picture) -> None:
    """examples/guides/pictures/recipes.svg is written by examples/benchmarks/recipes_picture.py."""
    text = picture.PICTURE.read_text(encoding="utf-8")
    assert text == picture.svg()
    assert "prefers-color-scheme: dark" in text
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name in picture.RECIPES)


def test_figures_of_the_readme_are_those_recorded(picture) -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    gap = picture.loss_gaps()["quartet2"]
    assert f"`quartet2` ends {gap} nats" in page and f"{gap.seeds} pairs" in page
    assert f"{row('models.json', 'saved_bits')['ratio']} bits per element instead of 16" in page
    peak = row("steps.json", "llama_8b_peak_memory")
    assert f"falls from {peak['bf16']:.2f} to {peak['value']:.2f} GiB" in page
    ratio, own, bf16 = fp8_row("fp8")
    assert f"takes {float(ratio):.2f} of its time in BF16 on an H100" in page
    assert f"takes {own} ms under `fp8` and {bf16} ms in BF16 (one H100)" in page
    assert f"`quartet2_fp8` takes {float(fp8_row('quartet2_fp8')[0]):.2f} of BF16's" in page
    assert f"takes {row('steps.json', 'llama_8b_step')['ratio']:.2f} on an H200" in page


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
