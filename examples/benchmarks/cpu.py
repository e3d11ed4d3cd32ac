# SPDX-License-Identifier: Apache-2.0
"""Times on a CPU: a training step of the demo, and the compilation of a Llama for a GPU.

    python examples/benchmarks/cpu.py [--only NAME,...] [--rounds N] [--out FOLDER]

    step            examples/train_llama.py in BF16 and with quartet2: a training step (forward,
                    backward, gradient clipping, AdamW), the compilation with empty and with warm
                    caches (the first step less a median one). One process per recipe and round,
                    recipes in turn. On a CPU every GEMM is emulated: this says nothing about GPUs.
                    With Q2COMPILE_DISABLE_KERNELS=cpp by the torch references
    first_step      CPU seconds that one more layer of a Llama adds to the first step, by phase of
                    the compilation, for a GPU that need not be there (--capability 90: 9.0).
                    Graphs are captured, partitioned and lowered, and code is written; Triton's
                    kernels, which equal layers share, are not compiled. One process per sample,
                    without caches; the minimum over rounds. A phase does not include the phases
                    inside it. Options as "auto" decides for an 8B model on an H200

Measure on an idle machine: emulation consists of many short parallel operations, which a busy
machine delays more than it delays BF16. The load average is printed.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import HERE, Benchmark, Row, run

DEMO = HERE.parent / "train_llama.py"
RECIPES = ("bf16", "quartet2")
WARM_UP_STEPS = 2


# ---- a training step -----------------------------------------------------------------------------


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


def step(args: Namespace) -> list[Row]:
    if args.steps <= WARM_UP_STEPS:
        sys.exit(f"--steps {args.steps}: the first {WARM_UP_STEPS} are not timed, give more")
    return ratios(measure(args.size, args.steps, args.rounds or 3))


# ---- the first step by phase ---------------------------------------------------------------------

WIDTH, TOKENS, VOCABULARY = 256, 512, 512
OPTIONS = {"bf16": None, "quartet2": {"recompute_weights": True, "fuse_rotations": True}}
# Phase -> the functions that it is, and all phases but "Dynamo" are inside that one.
_FX, _GRAPH = "torch._inductor.compile_fx", "torch._inductor.graph.GraphLowering"
PHASES = {
    "AOTAutograd": [f"{_FX}.compile_fx"],
    "joint trace": ["torch._functorch._aot_autograd.graph_compile.aot_dispatch_autograd_graph"],
    "joint passes": [f"{_FX}._recursive_joint_graph_passes"],
    "partitioner": [
        f"{module}.min_cut_rematerialization_partition"
        for module in (_FX, "torch._functorch.partitioners")
    ],
    "post-grad passes": [f"{_FX}._recursive_post_grad_passes"],
    "lowering": [f"{_GRAPH}.run"],
    "scheduler": ["torch._inductor.scheduler.Scheduler.__init__"],
    "code generation": [f"{_GRAPH}.codegen"],
}
OUR_PHASES = {
    "q2compile: rewrite": ["q2compile.backend.rewrite"],
    "q2compile: joint passes": ["q2compile.compiler.joint_passes.JointPasses.__call__"],
    "q2compile: post-grad passes": ["q2compile.compiler.post_grad_passes.PostGradPasses.__call__"],
}


class Clock:
    """Seconds of this process, of each phase without those inside of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        self._switch()
        self._inside.append(phase)
        try:
            yield
        finally:
            self._switch()
            self._inside.pop()

    def _switch(self) -> None:
        now = time.process_time()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def watch(self, phase: str, path: str) -> None:
        """Count the calls of a function to a phase, wherever its module is asked for it."""
        owner_path, _, name = path.rpartition(".")
        try:
            owner: Any = import_module(owner_path)
        except ModuleNotFoundError:
            module, _, cls = owner_path.rpartition(".")
            owner = getattr(import_module(module), cls)
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(phase):
                return function(*args, **kwargs)

        setattr(owner, name, timed)


def sample(variant: str, layers: int, capability: int) -> dict[str, float]:
    """Seconds of each phase of a forward and backward, in this process."""
    sys.path.insert(0, str(HERE.parents[1]))
    emulation = import_module("tests.support.emulation.inductor")
    options = OPTIONS[variant]
    pretended = pytest.MonkeyPatch()
    emulation.emulate(pretended, capability)
    clock = Clock()
    if options is not None:
        emulation.serve_as_on(pretended, capability)
    for phase, paths in {**PHASES, **(OUR_PHASES if options is not None else {})}.items():
        for path in paths:
            clock.watch(phase, path)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).bfloat16()
    tokens = torch.randint(VOCABULARY, (1, TOKENS))
    how: dict[str, Any] = {} if options is None else {"backend": "quartet2", "options": options}
    with torch._inductor.config.patch(emulation.INDUCTOR_OPTIONS), clock.of("Dynamo and the rest"):
        torch.compile(model, **how)(input_ids=tokens, labels=tokens).loss.backward()
    return dict(clock.seconds)


def measure_layers(
    layers: Sequence[int], rounds: int, capability: int
) -> dict[Any, dict[str, float]]:
    """(variant, layers) -> the least seconds of each phase over the rounds."""
    found: dict[Any, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for count in layers:
            for variant in OPTIONS:
                command = [sys.executable, __file__, "--sample", variant, "--layers", str(count)]
                done = subprocess.run(
                    [*command, "--capability", str(capability)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                )
                if done.returncode != 0:
                    raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
                phases = json.loads(done.stdout.splitlines()[-1])
                found.setdefault((variant, count), []).append(phases)
                print(f"{variant} {count} layers: {sum(phases.values()):.1f} s", flush=True)
    return {
        key: {phase: min(each[phase] for each in samples) for phase in samples[0]}
        for key, samples in found.items()
    }


def slopes(found: dict[Any, dict[str, float]], layers: Sequence[int]) -> list[dict[str, Any]]:
    """A row a phase: seconds of one layer more, and their ratio where BF16 has the phase."""
    few, many = min(layers), max(layers)
    rows = []
    for phase in ("all", "Dynamo and the rest", *PHASES, *OUR_PHASES):
        row: dict[str, Any] = {"name": phase, "unit": "seconds of a core for one layer more"}
        for variant in OPTIONS:
            more, less = found[variant, many], found[variant, few]
            if phase == "all":
                more, less = {phase: sum(more.values())}, {phase: sum(less.values())}
            row[variant] = round((more.get(phase, 0) - less.get(phase, 0)) / (many - few), 4)
        row["ratio"] = round(row["quartet2"] / row["bf16"], 3) if row["bf16"] else None
        rows.append(row)
    return rows


def first_step(args: Namespace) -> list[Row]:
    if len(set(args.layers)) < 2:
        sys.exit("--layers: a slope needs two numbers of layers, give both")
    found = measure_layers(args.layers, args.rounds or 2, args.capability)
    rows = slopes(found, args.layers)
    rows[0]["seconds"] = {
        f"{variant}, {count} layers": round(sum(phases.values()), 2)
        for (variant, count), phases in found.items()
    }
    load = round(statistics.mean(os.getloadavg()), 1)
    return [{**row, "load": load} for row in rows]


BENCHMARKS = {
    "step": Benchmark(step, "step_cpu.json", ("size", "steps", "rounds"), "cpu"),
    "first_step": Benchmark(
        first_step, "first_step.json", ("layers", "rounds", "capability"), "cpu"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser()
    parser.add_argument(
        "--rounds", type=int, help="processes per sample: 3 for step, 2 for first_step"
    )
    parser.add_argument("--size", default="demo", help="step: a size of train_llama.py")
    parser.add_argument("--steps", type=int, default=20, help="step: of one process")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8], help="first_step: slope")
    parser.add_argument("--capability", type=int, default=90, help="first_step: of the GPU")
    parser.add_argument("--sample", choices=OPTIONS, help=SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    if "--sample" in words:  # a process of measure_layers
        args = parser.parse_args(words)
        print(json.dumps(sample(args.sample, args.layers[0], args.capability)))
        return
    run("cpu", __doc__, BENCHMARKS, parser, argv)


if __name__ == "__main__":
    main()
