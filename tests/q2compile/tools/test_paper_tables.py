# SPDX-License-Identifier: Apache-2.0
"""`q2compile tables`: its measurements, on small samples, and its output."""

import csv
import json
import math

import pytest
import torch

from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.tools import cli
from q2compile.tools.paper_tables import command, gradients, output, schemes
from q2compile.tools.paper_tables.gradients import ConcentrationRow
from tests.support.oracle import relative_error


def test_scheme_rows():
    rows = {r.scheme: r for r in schemes.measure_schemes(512, "cpu")}
    assert rows["nvfp4"].bits == pytest.approx(3.394, abs=0.03)
    assert rows["nvfp4"].difference == pytest.approx(0, abs=0.03)
    assert rows["nvfp4"].stored_bits == 4.5 and rows["mxfp4_rtn"].stored_bits == 4.25
    for unbiased in ("nvfp4_sr", "nvfp4_ms_eden", "mxfp4_sr"):
        assert rows[unbiased].alignment == pytest.approx(1, abs=2e-3)
    assert rows["nvfp4"].alignment < 0.997
    text = output.scheme_table(list(rows.values()))
    assert "nvfp4_ms_eden_pow2" in text and ">3.32" in text


def test_a_layer_of_each_recipe():
    rows = {r.recipe: r for r in gradients.measure_layer("pow2", 256, "cpu")}
    assert set(RECIPES) - {"bf16"} <= set(rows)
    assert rows["quartet2"].y > 2.8, "the authors' floor"
    assert rows["quartet2"].dx > rows["tetrajet2"].dx > 2
    assert rows["mxfp4"].y == float("inf"), "its forward is exact"
    assert "exact" in output.layer_table(list(rows.values()))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_the_truth_is_what_draws_average_to(name):
    recipe = resolve(name)
    x, w, dy = (torch.randn(64, 64) for _ in range(3))
    mean = [torch.zeros(64, 64, dtype=torch.float64) for _ in range(2)]
    for _ in range(32):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        for total, g in zip(
            mean, torch.autograd.grad(gradients.linear(*leaves, recipe), leaves, dy), strict=True
        ):
            total += g / 32
    truth = gradients.exact_gradients(recipe, x, w, dy)
    for gemm, one, other in zip((recipe.dgrad, recipe.wgrad), mean, truth, strict=True):
        # one draw is at 0.02 to 0.06: an untrue truth would leave the mean there, as it leaves that
        # of a GEMM without random bits, whose draws are all the same
        drawn = gemm.a.draws or gemm.b.draws
        assert relative_error(one, other) < (0.015 if drawn else 0.06)


def test_means_of_groups():
    """Means of 1, 4 and 16 draws, each averaged over all disjoint groups."""
    truth = [torch.ones(3)]
    means = gradients._Means(truth, 16)
    for i in range(16):
        means.add([torch.ones(3) * (2 if i % 2 else 0)])
    assert means.errors() == {1: [1.0], 4: [0.0], 16: [0.0]}


def test_concentration_table_says_what_a_step_gains():
    rows = [
        ConcentrationRow("quartet2", n, (2.0 + i, 3.0 + i, 4.0 + i))
        for i, n in enumerate((1, 4, 16))
    ]
    text = output.concentration_table(rows)
    assert "+1.00 / +1.00 / +1.00" in text
    assert "+0.1 / +0.5 / -0.4" in text, "beside the floors at 16 draws"


def test_requantized_is_the_long_way_or_as_good():
    exact, pow2 = schemes.measure_requantized(512, "cpu")
    assert pow2.bits == math.inf
    for row in (exact, pow2):  # on 4-bit values, MS-EDEN's 9.4e-3; 2000 blocks scatter by 1%
        assert abs(row.error / row.error_of_long_way - 1) < 0.02


def test_command_writes_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "DEFAULT", command.Effort(samples=256, draws=4))
    few = {name: schemes.SCHEMES[name] for name in ("nvfp4", "mxfp4_quest")}
    monkeypatch.setattr(schemes, "SCHEMES", few)
    monkeypatch.setattr(gradients, "VARIANTS", {"quartet2": "quartet2", "mxfp4": "mxfp4"})
    assert cli.main(["tables", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "effective bits" in printed and "tables.json" in printed
    written = json.loads((tmp_path / "tables.json").read_text())
    assert written["about"]["draws"] == 4
    assert {r["recipe"] for r in written["concentration"]} == {"quartet2", "mxfp4"}
    assert written["layer"][1]["y"] is None, "JSON has no infinity"
    with (tmp_path / "concentration.csv").open() as file:
        assert next(csv.DictReader(file)).keys() == {"recipe", "draws", "W1", "W2", "W3"}
    pytest.importorskip("matplotlib")
    assert (tmp_path / "concentration.png").read_bytes()[:4] == b"\x89PNG"
