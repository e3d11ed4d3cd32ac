"""What the first step of a Llama takes one CPU core, phase by phase, for a GPU that is not there.

    python examples/benchmarks/first_step.py [--layers 4 8] [--rounds 2] [--capability 90]

Needs no GPU and launches nothing: graphs are traced, rewritten, cut, lowered, and their code is
written, as on the GPU named; Triton's kernels, which equal layers share, are not compiled. Each
sample is a process of its own without compiler caches; variants take turns. Seconds are those of
the process, since a busy machine changes those least, and those of a phase are without the phases
inside of it. What counts is the slope: the seconds of one layer more.

Weights' codes are made again in the backward, as "auto" decides for a model of 8B parameters, and
rotating quantisers compute their operand, as "auto" decides for an H200.

Prints a table and writes results/first_step.json beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cpu import provenance
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
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
        fused = import_module("q2compile.runtime_kernels.cuda.fused_site")
        pretended.setattr(fused.FusedSite, "_call", lambda site, given: None)
    for phase, paths in {**PHASES, **(OUR_PHASES if options is not None else {})}.items():
        for path in paths:
            clock.watch(phase, path)
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


def measure(layers: Sequence[int], rounds: int, capability: int) -> dict[Any, dict[str, float]]:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8], help="of which the slope")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each sample")
    parser.add_argument("--capability", type=int, default=90, help="90: 9.0, as an H200 has")
    parser.add_argument("--sample", choices=OPTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "first_step.json")
    args = parser.parse_args(argv)
    if args.sample:
        print(json.dumps(sample(args.sample, args.layers[0], args.capability)))
        return 0
    if len(set(args.layers)) < 2:
        parser.error("--layers: a slope needs two numbers of layers, give both")

    found = measure(args.layers, args.rounds, args.capability)
    arguments = shlex.join(sys.argv[1:] if argv is None else argv)
    source = provenance(f"python examples/benchmarks/first_step.py {arguments}".strip())
    source["load"] = round(statistics.mean(os.getloadavg()), 1)
    rows = slopes(found, args.layers)
    print(f"{'a layer':<30}{'bf16, s':>10}{'quartet2, s':>13}{'ratio':>8}")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"{row['name']:<30}{row['bf16']:>10.3f}{row['quartet2']:>13.3f}{ratio:>8}")
    rows[0]["seconds"] = {
        f"{variant}, {count} layers": round(sum(phases.values()), 2)
        for (variant, count), phases in found.items()
    }
    args.out.write_text(json.dumps([{**row, **source} for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
