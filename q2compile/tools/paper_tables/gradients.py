# SPDX-License-Identifier: Apache-2.0
"""Errors of a linear layer's output and gradients under the recipes, by `q2::linear`.

A recipe's gradients are compared with the gradient of its *own* quantized forward: dy Q(w) if dgrad
takes the codes that fprop saved, dy w if it takes w. The mean over draws of an unbiased recipe
converges to it; that of a biased one does not. Quartet II (arXiv 2601.22813 v2), appendix A and
figure 9, does so with a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS, Recipe
from q2compile.recipes.resolve import resolve
from q2compile.tools.paper_tables.schemes import effective_bits
from q2compile.tools.quantize import QuantizedTensor, quantize

WIDTH = 256  # of the MLP, and its tokens
LAYERS = 3

# Beside the published systems, what each of their choices is for: the same with one of them undone.
VARIANTS: dict[str, Any] = {
    **{name: name for name in RECIPES if name != "bf16"},
    "quartet2, fixed signs": {
        "base": "quartet2",
        **{
            gemm: {role: {"transform": "rht128_fixed"} for role in GEMMS[gemm]}
            for gemm in ("dgrad", "wgrad")
        },
    },
    "tetrajet2, 4/6 in backward": {
        "base": "tetrajet2",
        **{
            gemm: {role: {"scheme": "nvfp4_sr_46"} for role in GEMMS[gemm]}
            for gemm in ("dgrad", "wgrad")
        },
    },
}


@dataclass(frozen=True)
class LayerRow:
    """One linear layer, one draw: effective bits of y against x wᵀ, of dx and dw against the
    gradient of the quantized forward, and against that of x wᵀ."""

    recipe: str
    y: float
    dx: float
    dw: float
    dx_unquantized: float
    dw_unquantized: float


@dataclass(frozen=True)
class ConcentrationRow:
    """The mean gradient of `draws` draws: effective bits for each layer's weight, first to last."""

    recipe: str
    draws: int
    bits: tuple[float, ...]


def linear(x: Tensor, w: Tensor, recipe: Recipe, salt: int = 0) -> Tensor:
    """x wᵀ as the recipe computes it."""
    return torch.ops.q2.linear(x, w, None, *recipe.texts(), salt)


def exact_gradients(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dw of the quantized forward, straight through its rounding but for a trust mask."""
    fprop = recipe.fprop
    if fprop is None:
        return dy @ w, dy.t() @ x
    qx = quantize(x, fprop.a.scheme, transform=fprop.a.transform)
    qw = quantize(w, fprop.b.scheme, transform=fprop.b.transform)
    return (
        _exact(dy, w, qw, recipe.dgrad, qx.mask),
        _exact(dy.t(), x, qx, recipe.wgrad, qw.mask),
    )


def _exact(
    dy: Tensor, other: Tensor, codes: QuantizedTensor, gemm: Any, mask: Tensor | None
) -> Tensor:
    """dy times what the GEMM's second operand stands for, then through the first one's mask."""
    if gemm is None or gemm.b.source in ("fresh", "forward"):
        return dy @ other
    if mask is None:
        return dy @ codes.dequantize()
    rotated = dy @ codes.dequantize(rotate_back=False)
    back = torch.ops.q2.masked_unrotate(rotated, mask, codes.transform)
    return back[:, : other.shape[1]]


def measure_layer(global_scale: str, size: int, device: str, seed: int = 0) -> list[LayerRow]:
    """A row for every variant: x, w and dy of N(0,1), `size` x `size`."""
    generator = torch.Generator(device).manual_seed(seed)
    x, w, dy = (torch.randn(size, size, generator=generator, device=device) for _ in range(3))
    rows = []
    for name, spec in VARIANTS.items():
        recipe = resolve(spec, global_scale)
        torch.manual_seed(seed)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = linear(*leaves, recipe)
        gradients = torch.autograd.grad(y, leaves, dy)
        exact = exact_gradients(recipe, x, w, dy)
        plain = dy @ w, dy.t() @ x
        bits = [_bits(g, e) for g, e in zip(gradients * 2, exact + plain, strict=True)]
        rows.append(LayerRow(name, _bits(y, x @ w.t()), *bits))
    return rows


class _ExactBackward(torch.autograd.Function):
    """The recipe's forward with the exact gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe, salt: int) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x, w)
        return linear(x, w, recipe, salt)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return *exact_gradients(ctx.recipe, x, w, dy), None, None


def measure_concentration(
    global_scale: str,
    draws: int,
    device: str,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> list[ConcentrationRow]:
    """Rows for every variant at 1, 4, 16, ... `draws` draws.

    A 3-layer MLP of width 256 with ReLU on 256 tokens of N(0,1), mean squared error to a random
    target. A draw is one forward and backward of the same batch. The error of a mean of n draws is
    itself averaged over the draws / n groups that there are.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, target = (torch.randn(WIDTH, WIDTH, generator=generator, device=device) for _ in range(2))
    weights = [
        (torch.randn(WIDTH, WIDTH, generator=generator, device=device) / WIDTH**0.5)
        for _ in range(LAYERS)
    ]

    def gradients(recipe: Recipe, layer: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [w.clone().requires_grad_() for w in weights]
        h = x
        for i, w in enumerate(leaves):
            h = layer(h if i == 0 else torch.relu(h), w, recipe, i)
        return list(torch.autograd.grad((h - target).square().mean(), leaves))

    rows = []
    for name, spec in VARIANTS.items():
        progress(name)
        recipe = resolve(spec, global_scale)
        torch.manual_seed(seed)
        means = _Means(gradients(recipe, _ExactBackward.apply), draws)
        for _ in range(draws):
            means.add(gradients(recipe, linear))
        for n, errors in means.errors().items():
            rows.append(ConcentrationRow(name, n, tuple(effective_bits(e) for e in errors)))
    return rows


class _Means:
    """Errors of the means of 1, 4, 16, ... draws, over disjoint groups of a stream of draws."""

    def __init__(self, truth: list[Tensor], draws: int) -> None:
        self.truth = [t.double() for t in truth]
        self.sizes = [4**i for i in range(draws.bit_length()) if 4**i <= draws]
        self.sums = {n: [torch.zeros_like(t) for t in self.truth] for n in self.sizes}
        self.totals = {n: [0.0] * len(truth) for n in self.sizes}
        self.count = 0

    def add(self, gradients: list[Tensor]) -> None:
        self.count += 1
        for n in self.sizes:
            for i, gradient in enumerate(gradients):
                self.sums[n][i] += gradient
                if self.count % n == 0:
                    self.totals[n][i] += _error(self.sums[n][i] / n, self.truth[i])
                    self.sums[n][i].zero_()

    def errors(self) -> dict[int, list[float]]:
        return {n: [t / (self.count // n) for t in self.totals[n]] for n in self.sizes}


def _error(estimate: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return ((estimate.double() - truth).square().sum() / truth.square().sum()).item()


def _bits(estimate: Tensor, truth: Tensor) -> float:
    return effective_bits(_error(estimate.detach(), truth))
