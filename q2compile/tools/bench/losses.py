# SPDX-License-Identifier: Apache-2.0
"""50 steps of a tiny model, beside the losses of the references on a CPU.

Weights and data are the same on every device. Random bits are not, since each device has its own
generator. `losses.json`, which tests/support/bench_references.py writes, has the mean over several
runs on a CPU and how far they differ. A run agrees when the mean of its last LAST losses is within
a band of the curve's: DEVIATIONS standard deviations of that mean, and ROUNDING for other orders of
sums.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from q2compile.recipes.published import RECIPES
from q2compile.tools.bench.bench import Bench, failed
from q2compile.tools.bench.llama_block import Block, LlamaBlock
from q2compile.tools.bench.report import FAULT, PASSED, BenchRow

FILE = "losses.json"
STEPS, LAST = 50, 10
DEVIATIONS, ROUNDING = 5.0, 0.02  # ROUNDING in nats
WORDS = 256
_BLOCK = Block(width=128, inner=256, heads=4, key_values=2, batch=4, length=64)


class Model(nn.Module):
    """Tokens [batch, length] -> logits: an embedding, a block of a Llama, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, _BLOCK.width)
        self.block = LlamaBlock(_BLOCK)
        self.norm = nn.RMSNorm(_BLOCK.width)
        self.head = nn.Linear(_BLOCK.width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embedding(tokens))))


def batch(step: int) -> torch.Tensor:
    """Tokens [batch, length + 1]: each follows from the one before and two random bits, so that a
    model can get to 2 bits per token. Drawn from a CPU's generator."""
    generator = torch.Generator("cpu").manual_seed(1000 + step)
    shape = (_BLOCK.batch, _BLOCK.length + 1)
    bits = torch.randint(4, shape, generator=generator)
    tokens = torch.randint(WORDS, shape, generator=generator)
    for i in range(1, shape[1]):
        tokens[:, i] = (5 * tokens[:, i - 1] + 17 + 64 * bits[:, i]) % WORDS
    return tokens


def train(
    recipe: str, device: torch.device, seed: int, steps: int = STEPS, inner: str = "eager"
) -> list[float]:
    """The losses of so many steps. seed: of the random bits.  inner: of the options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    torch.manual_seed(seed)
    compiled = torch.compile(
        model, backend="quartet2", options={"recipe": recipe, "inner": inner}, dynamic=False
    )
    losses = []
    for step in range(steps):
        tokens = batch(step).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses(bench: Bench) -> Iterator[BenchRow]:
    """The losses of each recipe, beside the references'."""
    curves = shipped()
    recipes = RECIPES if bench.on_gpu else ["quartet2"]
    for recipe in recipes:
        bench.begun(recipe)
        steps = bench.sizes.steps
        row = BenchRow("losses", f"{recipe}, {steps} steps", status=PASSED)
        start = time.perf_counter()
        try:
            inner = "inductor" if bench.on_gpu else "eager"
            own = train(recipe, bench.device, 1, steps, inner)
            row.more["losses"] = [round(loss, 4) for loss in own]
            row.why = outside(own, **curves[recipe])
            row.status = FAULT if row.why else PASSED
        except Exception as error:  # the other recipes are run
            failed(row, error)
        row.more["seconds"] = round(time.perf_counter() - start, 1)
        yield row


def outside(own: list[float], mean: list[float], deviation: float) -> str:
    """How the last losses leave the band of a curve; "" if they are in it.

    mean: of the runs, by step.  deviation: between runs, of the mean of the last LAST losses.
    """
    band = DEVIATIONS * deviation + ROUNDING
    curve = mean[: len(own)]
    got, want = (statistics.fmean(losses[-LAST:]) for losses in (own, curve))
    if abs(got - want) <= band:
        return ""
    off = (i for i, pair in enumerate(zip(own, curve, strict=True), 1) if _far(*pair, band))
    return (
        f"the mean of the last {LAST} losses is {got:.4f}, of the references {want:.4f} "
        f"+- {band:.4f}; off since step {next(off, len(own))}"
    )


def _far(own: float, want: float, band: float) -> bool:
    return not abs(own - want) <= 2 * band  # of one step; NaN is far


def shipped() -> dict[str, dict[str, Any]]:
    """mean and deviation of each recipe."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["curves"]
    return found
