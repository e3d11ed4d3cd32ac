# SPDX-License-Identifier: Apache-2.0
"""examples/paper_tables.py: its measurements, on small samples, and its output."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import paper_tables
from paper_tables import RECIPES, Means, Recipe, measure_layer, measure_scheme

from q2compile.runtime_kernels.numerics.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_every_scheme_has_a_row():
    """All but those of one table only: SR that clips, and stochastic MXFP4 with larger scales."""
    assert set(SCHEMES) - set(paper_tables.SCHEMES) == {
        *("nvfp4_sr_clip", "nvfp4_sr_clip_pow2", "mxfp4_rceil_sr")
    }
    assert set(paper_tables.SCHEMES) <= set(SCHEMES)


def test_scheme_rows():
    names = ("nvfp4", "mxfp4_rtn", "nvfp4_sr", "nvfp4_ms_eden_pow2", "mxfp4_sr")
    rows = {name: measure_scheme(name, 512, "cpu") for name in names}
    assert rows["nvfp4"]["bits"] == pytest.approx(3.394, abs=0.03)
    assert rows["nvfp4"]["error x 1e-3"] == pytest.approx(rows["nvfp4"]["paper"], rel=0.03)
    assert rows["nvfp4"]["stored bits"] == 4.5 and rows["mxfp4_rtn"]["stored bits"] == 4.25
    for unbiased in ("nvfp4_sr", "nvfp4_ms_eden_pow2", "mxfp4_sr"):
        assert rows[unbiased]["alignment"] == pytest.approx(1, abs=2e-3)
    assert rows["nvfp4"]["alignment"] < 0.997
    text = paper_tables.table([*rows.values()])
    assert "nvfp4_ms_eden_pow2" in text and "3.320" in text


def test_a_layer():
    rows = {name: measure_layer(name, "pow2", 256, "cpu") for name in ("quartet2", "tetrajet2")}
    assert rows["quartet2"]["y"] > rows["quartet2"]["floor"], "the authors' floor"
    assert rows["quartet2"]["dx"] > rows["tetrajet2"]["dx"] > 2


@pytest.mark.parametrize("name", RECIPES)
def test_the_truth_is_what_draws_average_to(name):
    recipe, layer = Recipe(name, "pow2"), nn.Linear(64, 64, bias=False)
    nn.init.normal_(layer.weight)
    x, dy = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    compiled, means = recipe.compiled(layer), [torch.zeros(64, 64), torch.zeros(64, 64)]
    for _ in range(32):
        gradients = torch.autograd.grad(compiled(x), (x, layer.weight), dy)
        means = [mean + gradient / 32 for mean, gradient in zip(means, gradients, strict=True)]
    truth = recipe.exact_gradients(x.detach(), layer.weight.detach(), dy)
    for gemm, mean, wanted in zip(("dgrad", "wgrad"), means, truth, strict=True):
        # one draw is at 0.02 to 0.06: an untrue truth would leave the mean there, as it leaves that
        # of a GEMM without random bits, whose draws are all the same
        operands = recipe.operands[gemm] or ()
        drawn = any("rht" in of.transform or "sr" in of.scheme for of in operands)
        assert paper_tables.relative_error(mean, wanted) < (0.015 if drawn else 0.06)


def test_means_of_groups():
    """Means of 1, 4 and 16 draws, each averaged over all disjoint groups."""
    means = Means([torch.ones(3)], 16)
    for i in range(16):
        means.add([torch.ones(3) * (2 if i % 2 else 0)])
    assert means.errors() == {1: [1.0], 4: [0.0], 16: [0.0]}


def test_it_writes_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_tables, "SCHEMES", ["nvfp4", "mxfp4_quest"])
    monkeypatch.setattr(paper_tables, "VARIANTS", {"quartet2": "quartet2", "mxfp4": "mxfp4"})
    paper_tables.main(["--out", str(tmp_path)], samples=256, draws=4)
    printed = capsys.readouterr().out
    assert "exact" in printed, "the forward of mxfp4 is"
    written = json.loads((tmp_path / "tables.json").read_text())
    assert written["about"]["draws"] == 4
    assert {row["recipe"] for row in written["concentration"]} == {"quartet2", "mxfp4"}
    assert written["layer"][1]["y"] is None, "JSON has no infinity"
    with (tmp_path / "concentration.csv").open() as file:
        assert next(csv.DictReader(file)).keys() == {
            *("recipe", "draws", "W1", "W2", "W3", "floors")
        }
    pytest.importorskip("matplotlib")
    assert (tmp_path / "concentration.png").read_bytes()[:4] == b"\x89PNG"
