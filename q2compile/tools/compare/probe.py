# SPDX-License-Identifier: Apache-2.0
"""Matmuls whose recipe is chosen anew in every run, and that measure their own error on request."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from q2compile.capture.inline_attention import inline_attention
from q2compile.capture.module_names import Names
from q2compile.config import Config
from q2compile.graph.nodes import LINEAR_OPS, q2_nodes
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import BF16, GEMMS, Recipe, parse
from q2compile.report.row import Row
from q2compile.rewrite.rewrite_graph import planned, rewrite
from q2compile.torch_internals.dynamo import called_graphs

_PLAIN = (BF16, BF16, BF16)


@dataclass
class Run:
    """The mode of all probed matmuls.

    gemms    those that are quantized, the others are computed in the tensors' own precision
    modules  the only modules that are quantized; None: all are
    in_fp8   by the recipe fp8 instead of their own
    measure  compute in high precision, and note the error of each quantized GEMM on the same
             operands
    """

    gemms: tuple[str, ...] = tuple(GEMMS)
    modules: Collection[str] | None = None
    in_fp8: bool = False
    measure: bool = False


@dataclass
class Errors:
    """Sums over the calls of one GEMM of one module: |q - g|² and |g|², g being the result in high
    precision and q that of the quantized GEMM on the same operands."""

    difference: float = 0.0
    norm: float = 0.0

    def add(self, quantized: Tensor, exact: Tensor) -> None:
        exact = exact.detach().double()
        self.difference += float((quantized.detach().double() - exact).square().sum())
        self.norm += float(exact.square().sum())

    @property
    def relative(self) -> float | None:
        """√(Σ|q - g|² / Σ|g|²); None if nothing was measured or all of g is zero."""
        return (self.difference / self.norm) ** 0.5 if self.norm else None


@dataclass
class Probes:
    """All probed matmuls of a model, the run they are in, and what they have measured.

    rows     one for each matmul of each compiled graph; ``rows_in_fp8``: if all were in FP8
    errors   module -> GEMM -> its `Errors`
    """

    config: Config
    run: Run = field(default_factory=Run)
    rows: list[Row] = field(default_factory=list)
    rows_in_fp8: list[Row] = field(default_factory=list)
    errors: dict[str, dict[str, Errors]] = field(default_factory=dict)

    def backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        """A Dynamo backend: rewrites as `quartet2` does, and runs the graph as it stands."""
        inline_attention(gm)
        all_in_fp8 = replace(self.config, recipe="fp8", policy={})
        self.rows_in_fp8 += [row for _, row, _ in planned(gm, all_in_fp8, Names.of_graph(gm))]
        rows = rewrite(gm, self.config, Names.of_graph(gm))
        self.rows += rows
        names = {row.seed_index: row.module for row in rows if row.taken}
        for graph in called_graphs(gm):
            _probe(graph, self, names)
        return gm.forward

    def noted(self, module: str, gemm: str) -> Errors:
        return self.errors.setdefault(module, {g: Errors() for g in GEMMS})[gemm]


def _probe(gm: fx.GraphModule, probes: Probes, names: dict[int | None, str]) -> None:
    """Put a `Probe` in place of each matmul that was taken.

    before    y = torch.ops.q2.linear.default(x, w, b, 'nvfp4 @ nvfp4', ..., 3)
    after     y = self.probe_3(x, w, b)
    """
    for node in list(q2_nodes(gm.graph, *LINEAR_OPS)):
        args: Any = node.args
        *operands, fprop, dgrad, wgrad, seed_index = args
        probe = Probe(
            probes, names[seed_index], node.target, parse(fprop, dgrad, wgrad), seed_index
        )
        gm.add_submodule(f"probe_{seed_index}", probe)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_module(f"probe_{seed_index}", tuple(operands))
        new.meta = node.meta
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.recompile()


class Probe(nn.Module):
    """One matmul: x [..., K], w [N, K] (or a stack of them), and the op's third operand, if any."""

    def __init__(
        self, probes: Probes, module: str, op: Any, recipe: Recipe, seed_index: int
    ) -> None:
        super().__init__()
        self._probes, self._module, self._op = probes, module, op
        self._recipe, self._seed_index = recipe, seed_index

    def forward(self, x: Tensor, w: Tensor, *third: Any) -> Tensor:
        run = self._probes.run
        if run.measure:
            return self._measured(x, w, *third)
        if run.modules is not None and self._module not in run.modules:
            return self._call(_PLAIN, x, w, *third)
        recipe = RECIPES["fp8"] if run.in_fp8 else self._recipe.only(run.gemms)
        return self._call(recipe.texts(), x, w, *third)

    def _call(self, texts: tuple[str, str, str], *operands: Any) -> Tensor:
        with _own_random_bits(operands[0]):
            return self._op(*operands, *texts, self._seed_index)

    def _measured(self, x: Tensor, w: Tensor, *third: Any) -> Tensor:
        """The matmul in high precision. Beside it, on copies of its operands, runs the quantized
        one, whose backward is given the same gradient."""
        y = self._call(_PLAIN, x, w, *third)
        if not torch.is_grad_enabled():
            return y
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, w)]
        fixed = [t.detach() if isinstance(t, Tensor) else t for t in third]
        exact = self._call(_PLAIN, *leaves, *fixed)
        own = self._call(self._recipe.texts(), *leaves, *fixed)
        if self._recipe.fprop is not None:
            self._probes.noted(self._module, "fprop").add(own, exact)
        gemms = [
            (gemm, leaf)
            for gemm, leaf in zip(("dgrad", "wgrad"), leaves, strict=True)
            if leaf.requires_grad and getattr(self._recipe, gemm) is not None
        ]

        def note(dy: Tensor) -> None:
            wanted = [leaf for _, leaf in gemms]
            pairs = zip(
                torch.autograd.grad(own, wanted, dy),
                torch.autograd.grad(exact, wanted, dy),
                strict=True,
            )
            for (gemm, _), (quantized, plain) in zip(gemms, pairs, strict=True):
                self._probes.noted(self._module, gemm).add(quantized, plain)

        if gemms and y.requires_grad:
            y.register_hook(note)
        return y


@contextmanager
def _own_random_bits(x: Tensor) -> Iterator[None]:
    """A forward that draws a seed leaves torch's generator as it was, so that dropout draws the
    same masks in every run."""
    devices = [x.device] if x.device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        yield
