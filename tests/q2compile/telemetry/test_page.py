"""The page of a folder: its data, the command, and what a browser makes of it."""

import json
import re

import pytest

from q2compile.telemetry.folder import COLUMNS
from q2compile.telemetry.page.document import headline, telemetry_page
from q2compile.telemetry.page.read import MOST_STEPS, STATISTICS, read_folder
from q2compile.tools import cli


def record(step, module="up", error=0.1, **others):
    row = dict.fromkeys(COLUMNS, 0.0)
    row |= {"step": step, "module": module, "gemm": "fprop", "operand": "x", "format": "nvfp4"}
    return {**row, "relative_error": error, "changed": None, **others}


def written(folder, *lines, rank=0):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"rank{rank}.jsonl").write_text(text)
    return folder


NONFINITE = {"event": "nonfinite", "step": 3, "module": "up", "gemm": "dgrad", "operand": "dy"}


def test_data(tmp_path):
    written(tmp_path, {"event": "start"}, record(0), record(2, error=0.2), NONFINITE)
    written(tmp_path, record(2, error=0.123456), rank=1)
    data = read_folder(tmp_path)
    assert data["steps"] == [0, 2] and data["ranks"] == [0, 1]
    one, other = data["operands"]
    assert one["curves"]["relative_error"] == [0.1, 0.2]
    assert other["curves"]["relative_error"] == [None, 0.1235]
    assert one["curves"]["zero"] == 0.0 and one["curves"]["changed"] is None
    assert data["nonfinite"] == [{"rank": 0, **NONFINITE}]
    assert headline(data) == "1 module, steps 0 to 2, on 2 ranks."


def test_a_resumed_run_and_a_line_that_was_cut_off(tmp_path):
    written(tmp_path, record(0), record(2), {"event": "start"}, record(2, error=0.3))
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"step": 4, "mod')
    (row,) = read_folder(tmp_path)["operands"]
    assert row["curves"]["relative_error"] == [0.1, 0.3]


def test_of_many_steps_some_are_shown(tmp_path):
    written(tmp_path, *(record(step) for step in range(1000)))
    steps = read_folder(tmp_path)["steps"]
    assert len(steps) == MOST_STEPS and steps[0] == 0 and steps[-1] == 999


@pytest.mark.parametrize("line", ["{", "3", '{"step": 1}', '{"step": "a", "module": "up"}'])
def test_other_files_are_refused(line, tmp_path):
    (tmp_path / "rank0.jsonl").write_text(f"{line}\n{json.dumps(record(1))}\n")
    with pytest.raises(ValueError, match="rank0.jsonl, line 1: not as q2compile writes it"):
        read_folder(tmp_path)


def test_one_file_that_loads_nothing(tmp_path):
    text = telemetry_page(written(tmp_path / "a<b", record(0, module="</script><b>")))
    assert "{{" not in text and "<title>a&lt;b: 1 module, step 0.</title>" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(data)["operands"][0]["module"] == "</script><b>"


def test_the_command_tells_folders_apart(tmp_path, capsys):
    assert cli.main(["report", str(written(tmp_path / "records", record(0)))]) == 0
    text = (tmp_path / "records" / "report.html").read_text()
    assert "<span>telemetry</span> <code>records</code>" in text
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty")]) == 2
    assert "no dump folder, and no records of telemetry" in capsys.readouterr().err


def test_in_a_browser(browser, tmp_path):
    """A chart a module, whose click opens one a statistic; the search, the theme, no way to the
    side on a phone."""
    rows = [record(step, module=f"layers.{i}.up") for i in range(3) for step in range(0, 50, 10)]
    folder = written(tmp_path / "records", *rows, {**NONFINITE, "module": "layers.1.up"})
    page = folder / "report.html"
    page.write_text(telemetry_page(folder))
    browser.open(page)
    assert browser.find("h1").text == "3 modules, steps 0 to 40."
    assert browser.texts(".card h2") == [f"layers.{i}.up" for i in range(3)]
    assert len(browser.texts("polyline")) == 3 and len(browser.texts(".bad")) == 1
    said = "NaN or Inf first in dy of dgrad of layers.1.up, at step 3, on rank 0."
    assert browser.texts(".notice")[0] == said
    browser.click(".card", "layers.2.up")
    assert browser.texts("#detail h2") == ["layers.2.up"]
    assert browser.texts("#detail h3") == list(STATISTICS)
    browser.press("/", *"1.up", "ENTER")
    assert browser.texts(".card h2") == ["layers.1.up"]
    browser.press("ESCAPE")
    browser.choose("#statistic", "zero")
    assert "not zero and are now" in browser.find("#about").text
    browser.size(390, 800)
    assert browser.overhang() == 0
    background = "return getComputedStyle(document.body).backgroundColor"
    light = browser.js(background)
    browser.click("#theme")
    assert browser.js(background) != light
    browser.click("#theme")  # the choice is remembered
    assert browser.errors() == []
