# SPDX-License-Identifier: Apache-2.0
"""The report page in Chromium, from the user's side: views, clicks and input."""

import json
import re
import shutil

import pytest

from q2compile.tools import cli
from q2compile.tools.page.command import read_dump
from q2compile.tools.page.document import report_page
from tests.support.page_dumps import SCRIPT, dump_of_net, with_more_layers


@pytest.fixture
def page(dumped):
    return dumped / "report.html"


@pytest.fixture
def opened(browser, page):
    """The page, just opened, without errors in its console."""
    browser.open(page)
    yield browser
    assert browser.errors() == []


def shown(browser):
    """Modules in the table: one line for equal layers."""
    return browser.texts("#table .opener code")


def lines(browser):
    """The labels of the tree that are on the page, not folded away."""
    labels = "[...document.querySelectorAll('.tree .line code')]"
    return browser.js(
        f"return {labels}.filter((e) => e.checkVisibility()).map((e) => e.textContent)"
    )


def focused(browser):
    return browser.js("return document.activeElement.dataset.path")


def show_graph(browser, tab="Rewrite"):
    browser.click(".tabs button", tab)


def open_folds(browser):
    browser.js("document.querySelectorAll('.fold').forEach((fold) => { fold.open = true; })")


PRODUCTS = "layers.0–3.<matmul>"
EQUAL = ["layers.0–3.q_proj", "layers.0–3.k_proj", "layers.0–3.up", "layers.0–3.down"]
MODULES = [*EQUAL, SCRIPT, "head", "tiny", PRODUCTS]


def test_it_opens_and_loads_nothing_else(opened):
    assert opened.find("h1").text.startswith("17 of 19 matmuls with a weight run in NVFP4")
    assert opened.js("return performance.getEntriesByType('resource').length") == 0
    assert set(shown(opened)) == set(MODULES)
    titles = ["Where", "Each matmul", "Each graph", "Memory saved for the backward pass"]
    assert opened.texts("section:not([hidden]) h2") == titles
    assert opened.texts(".tile h3") == [
        "Taken",
        "Left in BF16",
        "Saved for the backward",
        "Predicted time",
    ]


def test_names_that_are_html_are_text(opened):
    """An alert would make the next command of the driver fail."""
    assert SCRIPT in shown(opened) and SCRIPT in lines(opened)
    opened.click("#table .opener", SCRIPT)
    source = opened.find(".facts code.muted").text
    assert "self._modules[SCRIPT](x)" in source
    show_graph(opened)
    open_folds(opened)
    assert opened.js("return document.scripts.length") == 2


def test_products_of_activations_are_lines_of_their_own(opened):
    """They need no decision."""
    parts = "return [...document.querySelectorAll('#table tbody')].map((e) => e.textContent)"
    texts = opened.js(parts)
    title = "Products of activations, such as attention's, without a weight"
    assert [text.startswith(PRODUCTS) for text in texts[texts.index(title) + 1 :]] == [True] * 2
    assert not any(text.startswith(PRODUCTS) for text in texts[: texts.index(title)])
    opened.click("#search")
    opened.press(*"no weight")
    assert set(shown(opened)) == {PRODUCTS}


def test_search(opened):
    opened.click("#search")
    opened.press(*"down")
    assert shown(opened) == ["layers.0–3.down"] and "head" not in lines(opened)
    assert opened.find("#shown").text == "4 of 27 matmuls, in 1 line"
    opened.press("BACKSPACE", "BACKSPACE", "BACKSPACE", "BACKSPACE", *"layers.2 q_proj")
    assert shown(opened) == ["layers.2.q_proj"]
    opened.press("x")
    assert shown(opened) == [] and "No module matches." in opened.find(".tree").text
    opened.press("ESCAPE")
    assert set(shown(opened)) == set(MODULES)


def test_links_narrow_the_table(opened):
    """The search says to what."""
    said = "return document.getElementById('search').value"
    opened.click(".reasons button", "1 × policy: 'head' says bf16")
    assert shown(opened) == ["head"] and opened.js(said) == "policy: 'head' says bf16"
    opened.click(".recipe button", "4 matmuls")
    assert shown(opened) == ["layers.0–3.down"] and opened.js(said) == "quartet2 with bf16 dgrad"
    opened.click(".recipe button", "13 matmuls")
    assert shown(opened) == [*EQUAL[:3], SCRIPT] and opened.js(said) == "quartet2"
    opened.click("#search")
    opened.press("ESCAPE")
    assert set(shown(opened)) == set(MODULES)
    opened.press(*"left")
    assert shown(opened) == ["head", "tiny"]


def test_equal_layers_are_one_line_that_opens(opened):
    assert "layers.0–3" in lines(opened)
    assert opened.texts(".tree [data-path='layers.0–3'] .copies") == ["×4"]
    opened.click(".tree [data-path='layers.0–3'] code")
    assert "q_proj" not in lines(opened)
    own = [f"layers.{i}.q_proj" for i in range(4)]
    opened.click("#table .copies")
    assert [name for name in shown(opened) if name in own] == own
    opened.click("#table .opener", own[1])
    assert opened.find(".one + .detail")
    opened.click("#table .copies")
    assert not set(own) & set(shown(opened)) and opened.texts(".detail") == []


def test_sorting_keeps_what_is_open(opened):
    before = shown(opened)
    opened.click("#table .opener", before[0])
    opened.click(".tree [data-path='layers.0–3'] code")
    opened.click("#table [data-sort='saved']")
    assert sorted(shown(opened)) == sorted(before) and shown(opened) != before
    assert opened.find("#table .open + .detail") and "q_proj" not in lines(opened)
    for _ in range(2):
        opened.click("#table [data-sort='saved']")
    assert shown(opened) == before


def test_a_matmul_shows_its_gemms_and_its_kernels(opened):
    opened.click("#table .opener", "layers.0–3.down")
    labels = ".map((e) => e.getAttribute('aria-label'))"
    drawings = opened.js(f"return [...document.querySelectorAll('.details .gemm')]{labels}")
    assert drawings == [
        "fprop: y from x: NVFP4 4/6; w: NVFP4 4/6",
        "dgrad: dx from BF16",
        "wgrad: dw from dy: RHT 128, then NVFP4 MS-EDEN; "
        "x: codes of fprop, then RHT 128, then NVFP4 MS-EDEN",
    ]
    kernels = opened.texts(".details .kernels li")
    assert kernels[:2] == ["2× quantize rowwise by cpp", "1× gemm by cpp"]
    assert "torch" in kernels
    facts = opened.find(".details .facts").text
    assert "page_dumps.py:" in facts and "F.silu(self.up(x))" in facts
    assert "times BF16's time (slower)" in facts and "bits per element" in facts


def test_from_a_matmul_to_its_node_and_back(opened):
    """Also to one that is folded away, since nothing changed there. The module of the node leads
    back to the model."""
    opened.click("#table .opener", "layers.0–3.up")
    opened.click(".details .facts button", "graph 0")
    focused_node = "return document.activeElement.closest('.pair').textContent"
    assert "q2.linear" in opened.js(focused_node)
    opened.click("#table .opener", "layers.0–3.up")
    opened.click("#table .opener", "head")
    opened.click(".details .facts button", "graph 0")
    assert "head.weight" in opened.js(focused_node)
    opened.click(".in-module button", "head")
    assert focused(opened) == "head"


def test_graphs_side_by_side(opened):
    show_graph(opened)
    assert len(opened.texts(".pair.replaced")) >= 5
    assert opened.texts(".counts .mark") == ["19 changed"]
    calls = opened.texts(".pair.replaced .right")
    assert "q2.linear(" in calls[0] and "‹quartet2›" in calls[0] and "rht128" not in calls[0]
    assert opened.texts(".fold > summary")[0].endswith("unchanged nodes")
    assert not opened.js("return document.querySelector('.pair.same').checkVisibility()")
    opened.click(".fold > summary")
    assert opened.js("return document.querySelector('.pair.same').checkVisibility()")
    show_graph(opened, "Forward")
    # k_proj's weight, with q_proj's, in each of four layers: nothing else is to be seen there.
    assert opened.texts(".counts .mark") == ["4 moved"]
    left, right = (opened.texts(f".pair.moved .{side}:not(:empty)") for side in ("left", "right"))
    assert left == right and len(left) == 4
    show_graph(opened, "Backward")
    merged = opened.find(".passes tbody tr", "merge_seeds").get_attribute("textContent")
    assert "q2.seed −" in merged and re.search(r"\d (µs|ms|s)", merged)


def test_a_graph_that_no_pass_changed(browser, tmp_path):
    dump_of_net(tmp_path, layers=0)
    assert cli.main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    show_graph(browser, "Forward")
    assert browser.texts(".counts .mark") == []
    kinds = "return [...document.querySelectorAll('.pair')].map((pair) => pair.className)"
    assert set(browser.js(kinds)) == {"pair same"} and browser.errors() == []


def test_memory_by_module(opened):
    text = opened.find("#memory-view > .about").text
    assert text.startswith("The quantized matmuls save operands of 16.8 KiB, and in BF16 59.5 KiB")
    kept = opened.until("return document.querySelector('.saved')?.textContent")
    assert "quantized operands16.8 KiB" in kept and "Parameters and inputs" in kept
    opened.js("document.querySelector('.saved details').open = true")
    assert len(opened.texts(".other tbody tr")) == 7


def test_the_tree_by_keyboard(opened):
    opened.js("document.querySelector('.tree summary').focus()")
    assert focused(opened) == "layers.0–3" and "q_proj" in lines(opened)
    opened.press("ENTER")
    assert lines(opened) == ["layers.0–3", SCRIPT, "head", "tiny"]
    opened.js("document.querySelector('.tree .go').focus()")
    opened.press("ENTER")
    assert opened.js("return document.getElementById('search').value") == "layers.0–3"
    assert shown(opened) == [*EQUAL, PRODUCTS, PRODUCTS]


def test_stages_and_rows_by_keyboard(opened):
    opened.js("document.querySelector('.tabs button').focus()")
    opened.press("TAB", "ENTER")
    assert opened.js("return document.activeElement.textContent") == "Forward"
    opened.until("return document.querySelector('.sides')?.textContent.includes('forward')")
    opened.js("document.querySelector('#table .opener').focus()")
    opened.press("ENTER")
    assert opened.find(".details") and opened.js(
        "return document.activeElement.getAttribute('aria-expanded')"
    )


def test_dark_and_light(browser, page):
    """The page follows the system."""
    for theme, color in (("light", "rgb(247, 247, 245)"), ("dark", "rgb(17, 20, 22)")):
        browser.open(page, theme=theme)
        assert browser.js("return getComputedStyle(document.body).backgroundColor") == color


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_no_sideways_scrolling(browser, page, width):
    """With everything open that opens."""
    browser.open(page, width=width)
    browser.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    for _ in range(2):
        browser.js("document.querySelectorAll('#table .opener').forEach((e, i) => e.click())")
        assert browser.overhang() <= 0
    for tab in ("Rewrite", "Backward", "Forward code"):
        show_graph(browser, tab)
        assert browser.overhang() <= 0
    assert browser.errors() == []


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("bf16", "No matmul was taken, so no operand is saved in 4 bits."),
        ("mxfp4", "The quantized matmuls save no operand in 4 bits."),
    ],
)
def test_why_nothing_is_kept_although_there_is_a_backward(browser, tmp_path, recipe, said):
    dump_of_net(tmp_path, layers=0, recipe=recipe, policy={})
    assert cli.main(["report", str(tmp_path)]) == 0
    browser.open(tmp_path / "report.html")
    assert browser.texts(".tile .muted")[1] == said
    assert browser.texts("#memory-view > .about")[0] == said
    assert "No graph with a backward" not in browser.js("return document.body.innerText")


def test_old_dumps_open(browser, dumped, tmp_path):
    """Written before rows had calls, a scope and a source, and graphs nodes.json."""
    folder = tmp_path / "old"
    shutil.copytree(dumped, folder)
    rows = json.loads((folder / "report.json").read_text())
    for row in rows:
        for key in ("calls", "measured", "scope", "source"):
            del row[key]
    (folder / "report.json").write_text(json.dumps(rows))
    (folder / "graph_0" / "nodes.json").unlink()
    assert cli.main(["report", str(folder)]) == 0
    browser.open(folder / "report.html")
    assert "<matmul>" in shown(browser)
    browser.click("#table .opener", "layers.0–3.up")
    browser.click(".details .facts button", "graph 0")
    focused_node = "return document.activeElement.closest('.pair').textContent"
    assert "layers.0.up.weight" in browser.js(focused_node)
    assert browser.errors() == []


def test_measured_times_are_shown(browser, dumped, tmp_path):
    rows, notes, graphs = read_dump(dumped)
    times = {"device": "<b>GPU", "microseconds": 45.0, "bf16_microseconds": 100.0}
    for row in rows:
        row["measured"] = times if row["taken"] else {}
    path = tmp_path / "page.html"
    path.write_text(report_page("measured", rows, notes, graphs))
    browser.open(path)
    assert browser.find(".tile", "Measured time0.45 times BF16's")
    browser.click("#table .opener", "layers.0–3.up")
    text = "<b>GPU 0.45 times BF16's time (faster): 45 µs, BF16 100 µs"
    assert text in browser.find(".details .facts").text


def test_data_that_cannot_be_unpacked_is_said(browser, page, tmp_path):
    """As in a browser without DecompressionStream."""
    broken = tmp_path / "page.html"
    broken.write_text(re.sub('(id="data">)[^<]+', r"\1AAAA", page.read_text()))
    browser.open(broken)
    text = browser.find("main > .notice").text
    assert text.startswith("This page cannot be shown (TypeError") and "report.txt" in text
    assert len(browser.errors()) == 1


def test_a_page_of_nothing_opens(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report_page("none", [], [], {}))
    browser.open(path)
    assert browser.find("h1").text == "No matmul with a weight was seen."
    assert browser.errors() == []


def test_32_layers(browser, dumped, tmp_path):
    """Equal layers make as few lines as in a model of 4, and a graph of 32 layers opens."""
    folder = with_more_layers(dumped, tmp_path / "wide", 8)
    assert cli.main(["report", str(folder)]) == 0
    browser.open(folder / "report.html")
    assert "layers.0–31" in lines(browser)
    assert browser.find("#shown").text == "195 of 195 matmuls, in 9 lines"
    show_graph(browser)
    assert len(browser.texts(".pair.replaced .right")) == 8 * 17
    browser.click("#search")
    browser.press(*"layers.17")
    assert shown(browser)[0] == "layers.17.q_proj"
    assert browser.errors() == []
