# SPDX-License-Identifier: Apache-2.0
"""The page of a run, with its dump, telemetry and comparison, in Chromium."""

import json
import shutil

import pytest
import torch
from torch import nn

import q2compile
from q2compile.tools import cli
from q2compile.tools.page.command import run_page
from tests.support.page_data import data_of
from tests.support.page_records import NONFINITE, compared, record, written

UPS = [f"layers.{i}.up" for i in range(4)]
DOWNS = [f"layers.{i}.down" for i in range(4)]


@pytest.fixture(scope="module")
def run(dumped, tmp_path_factory):
    """A run whose layers.2.up has outliers in x, and an Inf in the last record."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(dumped, folder / "graphs")
    errors = dict(zip(UPS, (0.1, 0.1, 0.2, 0.09), strict=True)) | dict.fromkeys(DOWNS, 0.1)
    lines = [record(s, module, e + s / 1e4) for s in (0, 10, 20) for module, e in errors.items()]
    dgrads = [record(20, m, 0.09, gemm="dgrad", operand="dy") for m in UPS]
    lost = record(30, UPS[2], None)
    written(folder / "telemetry", *lines, *dgrads, lost, {**NONFINITE, "module": UPS[2]})
    compared(
        folder / "compare",
        **{**dict.fromkeys(DOWNS, (0.2, 90, 0.2)), **dict.fromkeys(UPS, (0.05, 10, 0.13))},
    )
    assert cli.main(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def opened(browser, run):
    browser.open(run / "report.html")
    yield browser
    assert browser.errors() == []


def shown(browser):
    return browser.texts("#table .opener code")


def test_parts_of_a_run_are_found_where_they_lie(run, tmp_path, capsys):
    assert data_of((run / "report.html").read_text())["telemetry"]["last"] == 30
    alone = run_page(run / "telemetry")
    assert data_of(alone)["rows"] == [] and "8 modules, steps 0 to 30." in alone
    assert data_of(run_page(run / "graphs"))["telemetry"] is None
    of_comparison = data_of(run_page(run / "compare"))
    assert [r["module"] for r in of_comparison["rows"]] == [*DOWNS, *UPS]
    assert of_comparison["headline"].startswith("All 8 matmuls with a weight")
    shutil.copytree(run / "telemetry", tmp_path / "two")
    shutil.copytree(run / "telemetry", tmp_path / "two" / "model2")
    (note,) = data_of(run_page(tmp_path / "two"))["notes"]
    assert note.endswith(f"name one of {tmp_path / 'two' / 'model2'}")
    shutil.rmtree(tmp_path / "two")
    assert cli.main(["report", str(run / "telemetry"), "--measure", "-o", str(tmp_path / "p")]) == 2
    assert "--measure times the matmuls of a dump" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "neither a dump (no report.json) nor records of telemetry" in capsys.readouterr().err
    (tmp_path / "compare.json").write_text('{"modules": [{}]}')
    (tmp_path / "report.json").write_text("[]")
    (tmp_path / "report.txt").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "not as q2compile writes it (KeyError" in capsys.readouterr().err


def test_a_model_that_was_evaluated_is_shown_once(browser, tmp_path):
    """The table has the lines of its inference graph below, which no figure counts."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    options = {"inner": "eager", "dump": str(tmp_path)}
    call = torch.compile(model, backend="quartet2", options=options)
    call(torch.randn(32, 64)).sum().backward()
    with torch.no_grad():
        call(torch.randn(32, 64))
    assert cli.main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    assert browser.texts("h1") == ["All 2 matmuls with a weight run in NVFP4 (quartet2)."]
    assert browser.texts("#tiles .value")[0] == "2 of 2"
    assert browser.texts("#shown") == ["2 of 2 matmuls, in 2 lines"]
    assert shown(browser) == ["0–1", "0–1"]
    assert browser.texts("#table .part") == ["The same matmuls, compiled for inference"]
    assert len(browser.texts(".tree .line")) == 1
    assert browser.errors() == []


@pytest.mark.parametrize("part", ["graphs", "telemetry", "compare"])
def test_two_folders_with_the_same_part(run, part, tmp_path, capsys):
    """Both were left out without a word."""
    for name in (part, f"{part}2"):
        shutil.copytree(run / part, tmp_path / name)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{part}, {part}2 hold the same part of a run" in capsys.readouterr().err


def test_it_opens_with_what_hurts_and_policies_to_copy(opened):
    texts = opened.texts("#findings li")
    assert 2 <= len(texts) <= 4
    assert texts[0].startswith(
        f"The first NaN or Inf appeared in dy of dgrad of {UPS[2]}, at step 3."
    )
    codes = opened.texts("#findings code")
    in_force = '"head": "bf16", "*.down": {"dgrad": "bf16"}'
    assert codes == [f'"policy": {{{in_force}, "{UPS[2]}": "bf16", "*.up": "bf16"}}']
    opened.click("#findings button", "Copy")
    said = opened.until(
        "const said = document.querySelector('#findings button').textContent;"
        "return said !== 'Copy' && said"
    )
    if said != "Copied":  # this browser lets no page write to the clipboard
        assert opened.js("return getSelection().toString()").strip() == codes[0]


def test_columns_sort(opened):
    in_order = shown(opened)
    opened.click('[data-sort="share"]')
    assert shown(opened)[:2] == ["layers.0–3.down", "layers.0–3.up"]
    cells = [t for t in opened.texts('#table [data-column="share"]') if t]
    assert cells == ["80%", "20%"]
    opened.click('[data-sort="error"]')
    assert shown(opened)[0] == "layers.0–3.up"
    worst = opened.find("#table tr.row .error")
    assert worst.text == "2.11" and "x of fprop of layers.2.up" in worst.get_attribute("title")
    opened.click('[data-sort="error"]')
    assert shown(opened)[:2] == ["layers.0–3.down", "layers.0–3.up"]
    assert opened.texts("#table [aria-sort='ascending']") == ["Error, Gaussian = 1"]
    opened.click('[data-sort="error"]')
    assert shown(opened) == in_order


def test_the_heat_map_is_folded_as_the_tree(opened):
    assert opened.texts(".heat tbody th") == ["layers.0–3.up×4", "layers.0–3.down×4"]
    assert opened.texts(".heat thead th") == ["Module", "x of fprop", "dy of dgrad"]
    cells = opened.texts(".heat tbody:nth-of-type(1) .heat-cell")
    assert cells == ["2.11", "0.94"]  # of NVFP4's .0956 on Gaussian data: the worst of four layers
    heat = "return document.querySelector('.heat-cell').style.getPropertyValue('--heat')"
    assert opened.js(heat) == "85%"
    opened.click(".heat .copies")
    assert opened.texts(".heat .one th") == UPS
    opened.click("#search")
    opened.press(*"down")
    assert opened.texts(".heat tbody th") == ["layers.0–3.down×4"]


def test_after_an_inf_the_last_finite_record_stays(opened):
    cell = opened.find(".heat-cell.old")
    assert cell.text == "2.11"
    assert "step 20, the last finite record" in cell.get_attribute("title")
    said = f"NaN or Inf first in dy of dgrad of {UPS[2]}, at step 3, on rank 0."
    assert opened.texts("#operands .notice") == [said]


def test_a_click_opens_the_curves(opened):
    opened.click(".heat-cell", "2.11")
    assert opened.texts(".curves h3") == [UPS[2]]
    assert opened.texts(".curves figcaption")[:2] == ["amax", "relative error"]
    assert len(opened.texts(".curve .reference")) == 1
    assert "step 20 0.202 · Gaussian data 0.0956" in opened.texts(".readout")[1]
    assert len(opened.texts(".curve .bad")) == 8
    opened.click(".curves header button", "Close")
    assert opened.texts(".curves:not([hidden])") == []


def test_the_foot_says_what_the_run_was(opened, run):
    foot = opened.find("#run").text
    facts = json.loads((run / "graphs" / "run.json").read_text())
    for text in (f"torch {torch.__version__}", facts["date"], facts["command"], "CPU"):
        assert text in foot
    assert '"inner": "eager"' in foot and facts["options"][0]["policy"]["head"] == "bf16"


@pytest.mark.parametrize("width", [1280, 390])
def test_no_sideways_scrolling(browser, run, width):
    browser.open(run / "report.html", width=width)
    browser.click(".heat-cell")
    browser.click("#table .opener", "layers.0–3.up")
    assert browser.overhang() <= 0
    assert browser.errors() == []


def test_explain_has_a_foot_too(browser, tmp_path):
    torch._dynamo.reset()
    report = q2compile.explain(nn.Linear(32, 32), torch.randn(4, 32), options={"inner": "eager"})
    report.to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert f"torch {torch.__version__}" in browser.find("#run").text
