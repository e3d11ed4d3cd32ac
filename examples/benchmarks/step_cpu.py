"""What NVFP4 emulation costs on a CPU: the demo's training step and its compilation, per recipe.

    python examples/benchmarks/step_cpu.py

Runs examples/train_llama.py on the CPU, one process per recipe and round, recipes alternating so
that a busy machine disturbs both alike. A step is forward, backward, gradient clipping and AdamW,
as in the demo. The first round of each recipe starts with empty compiler caches, later ones find
them filled; "compile" is the first step less a median one.

On a CPU the 4-bit numbers are emulated, so quartet2 can only be slower than bf16: this measures how
much patience a run without a GPU needs, and says nothing about NVFP4 hardware. Measure on an idle
machine: the emulation is many short parallel operations, and a busy one delays it far more than it
delays bf16. The load average before each process is printed with its result.

Prints a table and writes results/step_cpu.json beside this file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "train_llama.py"
RECIPES = ("bf16", "quartet2")
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Sample:
    """Seconds of one process: the median step, and what the first step took beyond it."""

    step: float
    compile: float


def run_demo(recipe: str, size: str, steps: int, folder: Path) -> Sample:
    """Train in a fresh process that keeps its compiler caches in `folder`."""
    out = folder / "out"
    command = [sys.executable, str(DEMO), "--recipes", recipe, "--size", size, "--device", "cpu"]
    command += ["--steps", str(steps), "--eval-every", str(steps), "--eval-batches", "1"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [*command, "--out", str(out)],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
    with open(out / f"{recipe}-seed0" / "losses.csv", newline="", encoding="utf-8") as file:
        seconds = [float(r["seconds"]) for r in csv.DictReader(file) if r["split"] == "train"]
    step = statistics.median(seconds[WARM_UP_STEPS:])
    return Sample(step=step, compile=seconds[0] - step)


def measure(size: str, steps: int, rounds: int) -> dict[str, list[Sample]]:
    """recipe -> one sample per round."""
    samples: dict[str, list[Sample]] = {recipe: [] for recipe in RECIPES}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds):
            for recipe in RECIPES:
                load = os.getloadavg()[0]
                sample = run_demo(recipe, size, steps, Path(folder) / recipe)
                print(f"round {index + 1} {recipe}: {sample}, load average {load:.2f}", flush=True)
                samples[recipe].append(sample)
    return samples


def ratios(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """One row per quantity: quartet2's seconds over bf16's."""
    quantities = {
        "training step": lambda s: statistics.median(sample.step for sample in s),
        "compile, cold caches": lambda s: s[0].compile,
    }
    if all(len(rounds) > 1 for rounds in samples.values()):
        quantities["compile, warm caches"] = lambda s: statistics.median(x.compile for x in s[1:])
    rows: list[dict[str, Any]] = []
    for name, quantity in quantities.items():
        seconds = {recipe: round(quantity(rounds), 4) for recipe, rounds in samples.items()}
        ratio = round(seconds["quartet2"] / seconds["bf16"], 3)
        rows.append({"name": name, "ratio": ratio, "unit": "quartet2 / bf16", "seconds": seconds})
    return rows


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance(command: str) -> dict[str, Any]:
    """Where and with what a number was measured."""
    return {
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("q2compile", "torch", "transformers")},
        },
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="demo", help="a size of train_llama.py")
    parser.add_argument("--steps", type=int, default=20, help="training steps of one process")
    parser.add_argument("--rounds", type=int, default=3, help="processes per recipe")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_cpu.json")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {args.steps}: the first {WARM_UP_STEPS} are not timed, give more")

    rows = ratios(measure(args.size, args.steps, args.rounds))
    arguments = shlex.join(sys.argv[1:] if argv is None else argv)
    source = provenance(f"python examples/benchmarks/step_cpu.py {arguments}".strip())
    print(f"{'':<24}{'bf16, s':>10}{'quartet2, s':>13}{'ratio':>8}")
    for row in rows:
        seconds = row["seconds"]
        print(
            f"{row['name']:<24}{seconds['bf16']:>10.3f}{seconds['quartet2']:>13.3f}{row['ratio']:>8.2f}"
        )
    print(", ".join(f"{key}: {value}" for key, value in source.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([{**row, **source} for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
