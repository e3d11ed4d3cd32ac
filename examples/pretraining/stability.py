"""One seed, trained in several ways that should be one: where and by how much they differ.

    compiled  by Inductor, in one go
    again     the same once more: what the device's own order of sums makes of it
    resumed   stopped in the middle and gone on with by another process
    eager     the same graphs without Inductor (`inner="eager"`)

Inductor keeps what it fuses in fp32 where eager rounds to bf16 in between, so eager is close and
not equal. The other three are equal on a CPU, and on CUDA with --deterministic; without it some
CUDA kernels (of attention's and the embedding's gradient) add up in an order that changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pretraining.record import Losses, Result
from pretraining.results import run_folder

VARIANTS = ("compiled", "again", "resumed", "eager")
# Runs a command of `pretrain.py train` per entry, all at once where there are devices.
RunAll = Callable[[Sequence[Sequence[str]]], None]


@dataclass(frozen=True)
class Difference:
    """Of one variant to `compiled`. first: the first step whose loss differs; 0 where none does."""

    run: str
    variant: str
    first: int
    largest_loss: float  # largest difference of a step's loss, nats per token
    largest_norm: float  # largest difference of a step's gradient norm, relative
    val_loss: float  # difference of the validation loss at the end

    def __str__(self) -> str:
        if not self.first:
            return f"{self.run}, {self.variant}: the same bits in all steps"
        return (
            f"{self.run}, {self.variant}: differs from step {self.first} on, loss by at most "
            f"{self.largest_loss:.2e}, norm by {100 * self.largest_norm:.2f}%, validation loss by "
            f"{self.val_loss:+.2e}"
        )


def train(
    names: Sequence[str], steps: int, out: Path, command: Sequence[str], run_all: RunAll
) -> None:
    """Train every variant of every run. command: `train` with all but runs, options and out."""
    first, second = [], []
    for name in names:
        for variant in VARIANTS:
            options = {"inner": "eager"} if variant == "eager" else {}
            one = [*command, "--runs", name, "--out", str(out / variant)]
            one += ["--compile-options", json.dumps(options)] if options else []
            first.append([*one, "--stop-at", str(steps // 2)] if variant == "resumed" else one)
            second += [one] if variant == "resumed" else []
    run_all(first)
    run_all(second)


def differences(names: Sequence[str], out: Path) -> list[Difference]:
    """Also written to stability.json."""
    found = [difference(name, v, out) for name in names for v in VARIANTS if v != "compiled"]
    (out / "stability.json").write_text(json.dumps([asdict(d) for d in found], indent=1) + "\n")
    return found


def difference(name: str, variant: str, out: Path) -> Difference:
    steps = []
    for folder in (out / "compiled", out / variant):
        losses = Losses.read(run_folder(folder, name, 0) / "losses.csv")
        steps.append([p for p in losses.points if p.split == "train"])
    pairs = list(zip(*steps, strict=True))
    differing = [x.step for x, y in pairs if (x.loss, x.grad_norm) != (y.loss, y.grad_norm)]
    val = [
        Result.read(run_folder(folder, name, 0) / "result.json").val_loss
        for folder in (out / "compiled", out / variant)
    ]
    return Difference(
        run=name,
        variant=variant,
        first=min(differing, default=0),
        largest_loss=max(abs(x.loss - y.loss) for x, y in pairs),
        largest_norm=max(abs(x.grad_norm - y.grad_norm) / x.grad_norm for x, y in pairs),
        val_loss=val[1] - val[0],
    )
