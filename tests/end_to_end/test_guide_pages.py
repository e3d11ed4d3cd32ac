# SPDX-License-Identifier: Apache-2.0
"""The guides as a whole: their index, their lists of passes and files, their drawings."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from q2compile.passes import pass_names
from tests.support.tracked import tracked

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "examples" / "guides"


def test_every_guide_is_in_the_index() -> None:
    """The README lists the pages, and the guides' own README the programs; no other page does."""
    index, programs = ((folder / "README.md").read_text() for folder in (ROOT, GUIDES))
    pages = {p.name for p in GUIDES.glob("*.md") if p.name != "README.md"}
    assert {name for name in pages if f"(examples/guides/{name})" not in index} == set()
    assert {p.name for p in GUIDES.glob("*.py") if f"({p.name})" not in programs} == set()
    assert {name for name in pages if f"({name})" in programs} == set()


def test_the_table_of_passes_has_all() -> None:
    page = (GUIDES / "extend.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*pass_names()}


def test_a_new_recipe_s_files_are_those_of_its_test() -> None:
    """The guide names each file that test_every_list_of_recipes_has_each reads."""
    source = (ROOT / "tests" / "q2compile" / "recipes" / "test_recipes.py").read_text()
    test = source.split("def test_every_list_of_recipes_has_each")[1].split("\ndef ")[0]
    read = {*re.findall(r'"([\w/]+\.(?:md|js|py))"', test)}
    guide = (GUIDES / "extend.md").read_text().split("## A recipe\n")[1].split("\n## ")[0]
    assert len(read) >= 3 and {name for name in read if f"`{name}`" not in guide} == set()


def test_pages_for_developers_name_what_there_is() -> None:
    """Every `name_in_code` and `folder/file.py` is in the repository, unless the page adds it."""
    files = [path for path in tracked(ROOT) if path.suffix != ".md"]
    words = {word for path in files for word in re.findall(rb"\w+", path.read_bytes())}
    paths = {f"/{path.relative_to(ROOT)}" for path in tracked(ROOT)}
    for page in (GUIDES / "extend.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        added = {*re.findall(r"adds? `(\w+)`|and `(\w+)`, which round|publish `(\w+)`", text)}
        added = {name for names in added for name in names}
        names = {*re.findall(r"`(\w*[a-z]_\w+)`", text)} - added
        assert {name for name in names if name.encode() not in words} == set(), page.name
        named = {*re.findall(r"`([\w/]+\.(?:py|cuh?|js|json|md))`", text)}
        ends = {file for file in named if not any(path.endswith(f"/{file}") for path in paths)}
        assert ends == set(), page.name


def test_guides_have_no_dates_and_no_measurements() -> None:
    """Those are on the page of measurements. A version is none."""
    for path in sorted(GUIDES.glob("*.md")):
        if path.name != "measured.md":
            found = re.findall(r"20\d\d-\d\d-\d\d|\d ± \.?\d|\d GiB\b", path.read_text())
            assert found == [], path.name


def test_the_drawing_is_for_light_and_dark() -> None:
    for path in GUIDES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text
        root = ElementTree.fromstring(text)
        words = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("t"))
        folders = re.findall(r"\b(\w+)/", words)
        assert folders
        names = {part for file in tracked(ROOT) for part in file.relative_to(ROOT).parts}
        assert set(folders) <= names
