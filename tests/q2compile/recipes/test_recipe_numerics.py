# SPDX-License-Identifier: Apache-2.0
"""Properties of a linear layer under each recipe: scaling, bias, the effect of a permutation."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import paper_tables

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve

RECIPES = [name for name in RECIPES if name != "bf16"]


def run(recipe: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, global_scale="pow2"):
    """y, dx and dw, with the same random bits at every call."""
    torch.manual_seed(5)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.ops.q2.linear(*leaves, None, *resolve(recipe, global_scale).texts(), 0)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def test_powers_of_two_go_through_exactly():
    """Gradients of 2^-40 are as good as any: no scale has a floor, no sum an epsilon."""
    for recipe, global_scale in product(RECIPES, ["pow2", "exact"]):
        x, w, dy = torch.randn(40, 96), torch.randn(48, 96), torch.randn(40, 48)
        y, dx, dw = run(recipe, x, w, dy, global_scale)
        a, b, c = 2.0**7, 2.0**-5, 2.0**-40
        y2, dx2, dw2 = run(recipe, x * a, w * b, dy * c, global_scale)
        assert torch.equal(y2, y * a * b)
        assert torch.equal(dx2, dx * b * c)
        assert torch.equal(dw2, dw * a * c)


@pytest.mark.parametrize("recipe", RECIPES)
def test_permuting_tokens_inside_a_block_changes_dw_alone(recipe):
    """Blocks of wgrad lie along the tokens; those of fprop do not."""
    x, w, dy = torch.randn(64, 96), torch.randn(48, 96), torch.randn(64, 48)
    order = torch.arange(64).roll(3)
    y, _, dw = run(recipe, x, w, dy)
    y2, _, dw2 = run(recipe, x[order], w, dy[order])
    # The same codes; the GEMM's own order of sums may differ by row in a bf16 fprop.
    torch.testing.assert_close(y2, y[order])
    assert not torch.equal(dw, dw2)
    torch.testing.assert_close(dw2, dw, rtol=0, atol=0.5 * dw.abs().max().item())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_poison_reaches_what_it_contributes_to(recipe, poison):
    """Trap 5: a loss scaler looks at dx and dw. In x it leaves the results of other rows as they
    are; with exact global scales, which all rows share, they stay finite."""
    x, w, dy = torch.randn(40, 96), torch.randn(48, 96), torch.randn(40, 48)
    bad_dy, bad_x = dy.clone(), x.clone()
    bad_dy[3, 7] = bad_x[3, 7] = poison
    rows, columns = torch.arange(40) != 3, torch.arange(48) != 7
    _, dx, dw = run(recipe, x, w, bad_dy)
    assert not dx[3].isfinite().any() and dx[rows].isfinite().all()
    assert not dw[7].isfinite().any() and dw[columns].isfinite().all()
    y, dx, _ = run(recipe, x, w, dy)
    y_bad, dx_bad, dw = run(recipe, bad_x, w, dy)
    assert torch.equal(y_bad[rows], y[rows]) and not y_bad[3].isfinite().any()
    assert torch.equal(dx_bad[rows], dx[rows]) and not dw.isfinite().all()
    y, _, dw = run(recipe, bad_x, w, dy, "exact")
    assert torch.equal(y.isfinite().all(1), rows) and not dw.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_of_zeros_gives_zeros(recipe):
    """Trap 1: a masked loss."""
    x, w = torch.randn(40, 96), torch.randn(48, 96)
    _, dx, dw = run(recipe, x, w, torch.zeros(40, 48))
    assert (dx == 0).all() and (dw == 0).all()


def last_gains(monkeypatch, variant: str) -> list[float]:
    """Bits gained by the mean gradient from 16 to 64 draws: 1 without bias."""
    monkeypatch.setattr(paper_tables, "WIDTH", 64)
    rows = paper_tables.measure_concentration(variant, "pow2", 64, "cpu")
    before, after = (row for row in rows if row["draws"] in (16, 64))
    return [after[name] - before[name] for name in ("W1", "W2", "W3")]


@pytest.mark.parametrize("recipe", ["quartet2", "tetrajet2", "mxfp4"])
def test_unbiased_recipes_concentrate(monkeypatch, recipe):
    assert all(gain > 0.85 for gain in last_gains(monkeypatch, recipe))


@pytest.mark.parametrize("variant", ["quartet2, fixed signs", "tetrajet2, 4/6 in backward"])
def test_biased_recipes_stop(monkeypatch, variant):
    """One sign vector for all steps; and 4/6, which keeps the better of two draws, in backward."""
    assert all(gain < 0.6 for gain in last_gains(monkeypatch, variant))
