# SPDX-License-Identifier: Apache-2.0
"""One token with a NaN or Inf in a batch of eight: the others' rows are those of the batch without
it, in the forward and in dX; gradients of weights show it (numerics/blocks.py). The layer of each
recipe is in tests/q2compile/recipes/test_recipe_numerics.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from q2compile.recipes.published import RECIPES
from tests.support.nonfinite import VALUES

pytestmark = pytest.mark.usefixtures("fresh_compiler")

QUANTIZING = [name for name in RECIPES if name != "bf16"]
BAD_ROW = 5


class Mlp(nn.Module):
    """Rows are tokens that do not look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def check(recipe: str, device: str, *values: float, evaluates: bool = True, **options) -> None:
    """evaluates: also without gradients, in a graph of its own."""
    torch.manual_seed(0)
    model, x = Mlp().to(device), torch.randn(8, 64).to(device)
    compiled = torch.compile(model, backend="quartet2", options={"recipe": recipe, **options})
    others = torch.arange(8) != BAD_ROW

    def step(x):
        model.zero_grad()
        torch.manual_seed(1)
        x = x.clone().requires_grad_()
        y = compiled(x)
        y.square().sum().backward()
        return y.detach().cpu(), x.grad.cpu(), [p.grad.cpu() for p in model.parameters()]

    for value in values:
        bad = x.clone()
        bad[BAD_ROW, 7] = value
        (y, dx, _), (y_bad, dx_bad, gradients) = step(x), step(bad)
        assert torch.equal(y_bad[others], y[others]) and torch.equal(dx_bad[others], dx[others])
        assert y[others].isfinite().all() and not y_bad[BAD_ROW].isfinite().any()
        assert not dx_bad[BAD_ROW].isfinite().any()
        assert all(not gradient.isfinite().all() for gradient in gradients)
        if evaluates:
            with torch.no_grad():
                y, y_bad = compiled(x).cpu(), compiled(bad).cpu()
            assert torch.equal(y_bad[others], y[others]) and not y_bad[BAD_ROW].isfinite().any()


@pytest.mark.parametrize("recipe", ["quartet2", "nvfp4", "quartet"])
def test_other_tokens_do_not_see_it(recipe) -> None:
    """Their backwards requantize saved codes, transpose them, and read masks."""
    check(recipe, "cpu", *VALUES[:2], inner="eager")


@pytest.mark.usefixtures("vectors")
def test_through_inductor() -> None:
    check("quartet2", "cpu", torch.nan, evaluates=False)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_on_a_gpu(recipe) -> None:
    check(recipe, "cuda", torch.inf)
