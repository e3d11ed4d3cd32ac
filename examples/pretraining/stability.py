# SPDX-License-Identifier: Apache-2.0
"""One seed, trained in several ways that should be equal: where and by how much they differ.

    compiled  by Inductor, in one go
    again     the same once more: differences by the device's own order of sums
    resumed   stopped in the middle and gone on with by another process
    eager     the same graphs without Inductor (`inner="eager"`)
    rounding  compiled, with other random bits: what may differ between two right computations
    oracle    linears by the torch references in fp32, nothing compiled

Inductor keeps what it fuses in fp32 where eager rounds to bf16 in between, so eager is close and
not equal. Again and resumed are equal to compiled on a CPU, and on CUDA with --deterministic;
without it some CUDA kernels (of attention's and the embedding's gradient) add up in an order that
changes. What differs at all grows: a difference of 1e-5 in the first step may be .03 after 200. So
eager and the oracle, which draws other random bits and rounds nothing to bf16, compute the same
numerics if their losses come to lie about as far from the compiled ones as those of other random
bits do, and if the gap between two runs is about that of the compiled ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.record import Losses, Result, without_folders
from pretraining.results import run_folder

ROUNDING_SEED = 1234567  # a seed that no run has
VARIANTS = {
    "compiled": [],
    "again": [],
    "resumed": [],
    "eager": ["--compile-options", json.dumps({"inner": "eager"})],
    "rounding": ["--rounding-seed", str(ROUNDING_SEED)],
    "oracle": ["--oracle"],
}
# Runs a command of `pretrain.py train` per entry, all at once where there are devices.
RunAll = Callable[[Sequence[Sequence[str]]], None]


@dataclass(frozen=True)
class Difference:
    """The difference of one variant to `compiled`. first: the first step whose loss differs; 0 if
    none does."""

    run: str
    variant: str
    first: int
    largest_loss: float  # largest difference of a step's loss, nats per token
    mean_loss: float  # mean difference of the losses of the second half of the steps
    largest_norm: float  # largest difference of a step's gradient norm, relative
    val_loss: float  # difference of the validation loss at the end

    def __str__(self) -> str:
        if not self.first:
            return f"{self.run}, {self.variant}: the same bits in all steps"
        return (
            f"{self.run}, {self.variant}: differs from step {self.first} on, loss by at most "
            f"{self.largest_loss:.2e} and by {self.mean_loss:+.2e} over the second half, norm by "
            f"at most {100 * self.largest_norm:.2f}%, validation loss by {self.val_loss:+.2e}"
        )


def train(
    names: Sequence[str],
    variants: Sequence[str],
    steps: int,
    out: Path,
    command: Sequence[str],
    run_all: RunAll,
) -> None:
    """Train the variants of every run. command: `train` with all but runs, options and out."""
    first, second = [], []
    for name in names:
        for variant in variants:
            one = [*command, "--runs", name, "--out", str(out / variant), *VARIANTS[variant]]
            first.append([*one, "--stop-at", str(steps // 2)] if variant == "resumed" else one)
            second += [one] if variant == "resumed" else []
    run_all(first)
    run_all(second)


def differences(names: Sequence[str], variants: Sequence[str], out: Path) -> list[Difference]:
    """Also written to stability.json, with what was trained, where and by which commands."""
    others = [v for v in variants if v != "compiled"]
    found = [difference(name, v, out) for name in names for v in others]
    results = {(name, v): result(out / v, name) for name in names for v in variants}
    first = results[names[0], "compiled"]
    commands = (without_folders(r.provenance["command"]) for r in results.values())
    written = {
        "setup": first.setup,
        **{key: first.provenance[key] for key in ("data", "device", "versions", "date")},
        "commands": list(dict.fromkeys(commands)),
        "differences": [asdict(d) for d in found],
        "val_losses": {name: {v: results[name, v].val_loss for v in variants} for name in names},
    }
    (out / "stability.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return found


def gaps(names: Sequence[str], variants: Sequence[str], out: Path) -> list[str]:
    """The gaps of each variant's validation losses: one line for each run after the first."""
    lines = []
    for name in names[1:]:
        shown = [
            f"{variant} {val_loss(out / variant, name) - val_loss(out / variant, names[0]):+.4f}"
            for variant in variants
        ]
        lines.append(f"{name} - {names[0]}, validation loss: {', '.join(shown)}")
    return lines


def val_loss(folder: Path, name: str) -> float:
    return result(folder, name).val_loss


def result(folder: Path, name: str) -> Result:
    return Result.read(run_folder(folder, name, 0) / "result.json")


def difference(name: str, variant: str, out: Path) -> Difference:
    steps = []
    for folder in (out / "compiled", out / variant):
        losses = Losses.read(run_folder(folder, name, 0) / "losses.csv")
        steps.append([p for p in losses.points if p.split == "train"])
    pairs = list(zip(*steps, strict=True))
    differing = [x.step for x, y in pairs if (x.loss, x.grad_norm) != (y.loss, y.grad_norm)]
    half = pairs[len(pairs) // 2 :]
    return Difference(
        run=name,
        variant=variant,
        first=min(differing, default=0),
        largest_loss=max(abs(x.loss - y.loss) for x, y in pairs),
        mean_loss=statistics.fmean(y.loss - x.loss for x, y in half),
        largest_norm=max(abs(x.grad_norm - y.grad_norm) / x.grad_norm for x, y in pairs),
        val_loss=val_loss(out / variant, name) - val_loss(out / "compiled", name),
    )
