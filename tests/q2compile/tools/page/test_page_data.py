# SPDX-License-Identifier: Apache-2.0
"""The report page without a browser: its data, its sentences, and that it escapes them."""

import base64
import hashlib
import json
import re

import pytest
import torch
from torch import nn

from q2compile.cost_model.ranges import Range
from q2compile.report.row import Row
from q2compile.tools.measure import measure
from q2compile.tools.page.command import read_dump, run_page
from q2compile.tools.page.document import beside_bf16, document, headline, report_page
from q2compile.tools.time_words import seconds_text, time_words
from tests.support.page_data import data_of
from tests.support.page_dumps import SCRIPT, with_more_layers


@pytest.fixture(scope="module")
def data(dumped):
    return data_of(run_page(dumped))


def row(**values):
    return Row("up", (256, 64, 32), **values).to_json()


def test_each_recipe_is_written_once(dumped, data):
    rows = json.loads((dumped / "report.json").read_text())
    taken = [r for r in rows if r["taken"]]
    assert len(data["recipes"]) == len({(r["recipe"], r["dgrad"]) for r in taken}) == 2
    assert [data["recipes"][r["recipe"]]["name"] for r in data["rows"] if r["taken"]] == [
        r["recipe"] for r in taken
    ]


def test_every_row_says_where_it_is_written(data):
    by_module = {r["module"]: r for r in data["rows"]}
    file, _, code = by_module["layers.1.up"]["source"]
    assert file.endswith("page_dumps.py")
    assert code == "return x + self.down(F.silu(self.up(x)))"
    products = [r for r in data["rows"] if not r["has_parameter"]]
    assert [r["scope"] for r in products] == [f"layers.{i}" for i in range(4) for _ in range(2)]


def test_calls_are_counted_by_gemm(dumped):
    rows, _, _ = read_dump(dumped)
    assert rows[0]["calls"] == {
        "fprop": {"quantize rowwise": 2, "gemm": 1},
        "dgrad": {"quantize rowwise": 1, "requantize columnwise": 1, "gemm": 1},
        "wgrad": {  # few rows: a group
            "quantize columnwise grouped": 1,
            "requantize columnwise grouped": 1,
            "gemm": 1,
        },
    }
    down = next(r for r in rows if r["module"] == "layers.0.down")
    assert down["calls"]["dgrad"] == {}  # bf16: torch's own product


def test_nodes_have_their_source_and_dynamos_node(dumped):
    origins = json.loads((dumped / "graph_0" / "nodes.json").read_text())
    for stage in ("2_forward", "4_after_passes_forward"):
        stack, name = origins["stages"][stage]["gemm"]
        *_, (file, _, function, code) = [origins["frames"][i] for i in origins["stacks"][stack]]
        assert (function, name) == ("forward", "linear_default") and "self.q_proj(h)" in code
        assert file.endswith("page_dumps.py")
    assert len(origins["stacks"]) < 60  # equal layers share them


def test_old_reports_render(dumped):
    """Written before rows had calls, a scope and a source, and graphs nodes.json."""
    rows, notes, graphs = read_dump(dumped)
    new = ("calls", "measured", "scope", "source")
    old = [Row(**{k: v for k, v in r.items() if k not in new}).to_json() for r in rows]
    files = {n: {f: t for f, t in of.items() if f != "nodes.json"} for n, of in graphs.items()}
    shown = document("old", old, notes, files)["rows"]
    assert {(r["scope"], *r["source"]) for r in shown} == {("",)}


def test_saved_tensors_of_a_graph(dumped, data):
    saved = data["graphs"][0]["saved"]
    kinds = {kind for *_, kind in saved}
    assert kinds == {"quantized", "other", "input"}
    of_q = [(type_, n) for module, _, type_, n, _ in saved if module == "layers.0.q_proj"]
    # x [24, 32] and w [32, 32]: codes, a scale for 16 of them, a global scale each.
    assert sorted(n for _, n in of_q) == sorted([24 * 16, 24 * 2, 4, 32 * 16, 32 * 2, 4])
    rows, _, _ = read_dump(dumped)
    quantized = sum(n for *_, n, kind in saved if kind == "quantized")
    assert quantized == sum(r["saved_bytes"] or 0 for r in rows)


def test_saved_tensors_of_symbolic_size_and_without_a_backward(tmp_path):
    options = {"inner": "eager", "dump": str(tmp_path)}
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    compiled = torch.compile(model, backend="quartet2", dynamic=True, options=options)
    compiled(torch.randn(24, 32)).sum().backward()
    with torch.no_grad():
        compiled(torch.randn(24, 32))
    trained, inference = data_of(run_page(tmp_path))["graphs"]
    assert inference["saved"] is None
    ((_, name, type_, size, _),) = [one for one in trained["saved"] if one[4] == "other"]
    assert (name, size) == ("tanh", None) and type_.startswith("f32[s")


@pytest.mark.parametrize(
    "ratio, words",
    [
        (0.45, "0.45 times BF16's time (faster)"),
        (1.0, "as long as BF16"),
        (1.1, "1.10 times BF16's time (slower)"),
        (3.1, "3.1 times BF16's time (slower)"),
        (Range(0.4, 0.65), "0.40-0.65 times BF16's time (faster)"),
        (Range(0.9, 1.2), "0.90-1.20 times BF16's time"),
        (Range(2.4, 3.1), "2.4-3.1 times BF16's time (slower)"),
    ],
)
def test_times_in_words(ratio, words):
    assert time_words(ratio) == words


def test_times_of_the_page():
    """At both ends of what is known; one number where they are written alike."""
    known = {"microseconds": 600.0, "microseconds_low": 400.0, "microseconds_high": 1200.0}
    known |= {"bf16_microseconds": 1000.0}
    known |= {"bf16_microseconds_low": 1000.0, "bf16_microseconds_high": 1000.0}
    assert beside_bf16([known, known]) == {
        "ratio": pytest.approx(0.8),
        "text": "0.40-1.20",
        "words": "0.40-1.20 times BF16's time",
        "slower": False,
        "own": {"value": 1600.0, "text": "800 µs-2.4 ms"},
        "bf16": {"value": 2000.0, "text": "2.0 ms"},
    }
    assert seconds_text(Range(1.5, 0.02)) == "20.0 ms-1.50 s"


def test_the_headline_of_a_model(dumped):
    rows, _, _ = read_dump(dumped)
    assert headline(rows) == (
        "17 of 19 matmuls with a weight run in NVFP4 "
        "(13 by quartet2, 4 by quartet2 with bf16 dgrad)."
    )


def test_measured_times(dumped):
    """On this machine's CPU, where nothing can be gained. Equal matmuls are timed once."""
    rows, notes, graphs = read_dump(dumped)
    up = [r for r in rows if r["module"].endswith("up")]
    measure(up, inner="eager")
    assert len({id(r["measured"]) for r in up}) == 1
    times = up[0]["measured"]
    assert times["device"] == "CPU"
    assert times["microseconds"] > times["bf16_microseconds"] > 0
    up[0]["device"] = "tpu"
    with pytest.raises(
        ValueError, match="--measure: .* compiled for 'tpu', which this machine lacks"
    ):
        measure(up, inner="eager")


def test_headlines_of_little():
    assert headline([]) == "No matmul with a weight was seen."
    left = [row(why="recipe: bf16")]
    assert headline(left) == "None of the 1 matmuls with a weight was taken."
    taken = [row(taken=True, fprop="mxfp4_sr @ mxfp4_sr", recipe="mine")]
    assert headline(taken) == "All 1 matmul with a weight runs in MXFP4 (mine)."


def test_the_page_runs_its_own_scripts_alone(data, dumped):
    """Its policy allows the one script by its hash. Text from the model is JSON or escaped."""
    page = run_page(dumped)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert page.count("<script") == 2
    assert not re.search(r"""(src|href)=["']?(?!#)\w""", page.split("<script")[0])
    assert SCRIPT in {r["module"] for r in data["rows"]}


def test_texts_with_anything_in_them_survive():
    hostile = "</script><!-- {{data}} {{title}} \u2028 & "
    read = data_of(report_page(hostile, [], [hostile + "\ud800"], {}))
    assert (read["name"], read["notes"]) == (hostile, [hostile + "\ud800"])


def test_32_layers_are_small(dumped, tmp_path):
    page = run_page(with_more_layers(dumped, tmp_path / "wide", 8))
    assert len(data_of(page)["rows"]) > 190
    assert len(page) < 1_000_000


def test_a_page_of_nothing():
    assert data_of(report_page("none", [], [], {}))["rows"] == []
