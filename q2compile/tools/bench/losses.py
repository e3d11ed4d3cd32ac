# SPDX-License-Identifier: Apache-2.0
"""50 steps of a tiny model, beside the losses of the references on a CPU.

Weights and data are the same on every device. Random bits are not, since each device has its own
generator: `losses.json` has the mean over SEEDS runs on a CPU, and how far runs differ,

    python -m q2compile.tools.bench.losses       writes it, in a minute on 16 cores

and a run agrees when the mean of its last LAST losses is within a band of the curve's: DEVIATIONS
standard deviations of that mean, and ROUNDING for other orders of sums.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from q2compile.recipes.published import RECIPES
from q2compile.tools.bench.bench import Bench, failed
from q2compile.tools.bench.llama_block import Block, LlamaBlock
from q2compile.tools.bench.report import FAULT, PASSED, BenchRow

FILE = "losses.json"
STEPS, LAST, SEEDS = 50, 10, 4
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


def _run(recipe: str, seed: int) -> list[float]:
    torch.set_num_threads(1)
    return train(recipe, torch.device("cpu"), seed)


def main() -> None:
    """Writes losses.json, or the file that is named."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(FILE)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {
            recipe: [
                pool.submit(_run, recipe, seed)
                for seed in range(1, 1 + (SEEDS if recipe != "bf16" else 1))
            ]
            for recipe in RECIPES
        }
        curves = {name: _curve([run.result() for run in own]) for name, own in runs.items()}
    result = {
        "what": f"losses of the model of losses.py, {SEEDS} runs with other random bits on a CPU",
        "command": "python -m q2compile.tools.bench.losses",
        "torch": torch.__version__,
        "curves": curves,
    }
    in_lines = json.dumps(result, indent=1) + "\n"  # each curve in one
    text = re.sub(r"\[[^]]*\]", lambda curve: " ".join(curve[0].split()), in_lines)
    path.write_text(text, encoding="utf-8")


def _curve(runs: list[list[float]]) -> dict[str, Any]:
    lasts = [statistics.fmean(run[-LAST:]) for run in runs]
    return {
        "mean": [round(statistics.fmean(step), 4) for step in zip(*runs, strict=True)],
        "deviation": round(statistics.stdev(lasts), 5) if len(lasts) > 1 else 0.0,
    }


if __name__ == "__main__":
    main()
