# SPDX-License-Identifier: Apache-2.0
"""Whether a change keeps every bit of a training: one seeded run at several commits.

    python -m tests.support.compare_losses HEAD~3 HEAD
    python -m tests.support.compare_losses HEAD~3 HEAD --recipes quartet2,nvfp4 --steps 40

Each commit is checked out into a temporary folder and imported from there, in a process of its own
with empty caches. It trains a small Llama with each recipe, on the GPU or else on this CPU, by
torch's deterministic algorithms. All losses are compared, and all weights after the last step.

compare_commits.py compares what is compiled, and needs no GPU; this compares what kernels compute.
A commit takes about four minutes on an H100 beside other work, for the four default recipes.

Exit status 0: the commits have the same bits; 1: some differ, as the table shows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RECIPES = ("quartet2", "nvfp4", "quartet", "mxfp4")


class Training(NamedTuple):
    """losses, weights: hashes of the bits of all. first, last: losses."""

    recipe: str
    losses: str
    weights: str
    first: float
    last: float


# ---- in a process of the commit that trains ------------------------------------------------------


def train(recipe: str, steps: int) -> Training:
    """A bf16 Llama of 37M parameters (on a CPU of 150k) learns a noisy permutation of tokens."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    from q2compile.backend import quartet2

    on_gpu = torch.cuda.is_available()
    width, layers, batch, length = (640, 6, 16, 512) if on_gpu else (64, 2, 2, 32)
    vocabulary = 8 * width
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=14 * width // 5 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        vocab_size=vocabulary,
        attention_bias=True,  # biases have gradients of their own
        use_cache=False,
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().to("cuda" if on_gpu else "cpu")
    compiled = torch.compile(model, backend=quartet2, options={"recipe": recipe})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    follows = torch.randperm(vocabulary, generator=generator)

    losses = []
    for _ in range(steps):
        tokens = [torch.randint(vocabulary, (batch,), generator=generator)]
        for _ in range(length - 1):
            noise = torch.randint(vocabulary, (batch,), generator=generator)
            keep = torch.rand(batch, generator=generator) < 0.9
            tokens.append(torch.where(keep, follows[tokens[-1]], noise))
        ids = torch.stack(tokens, 1).to(model.device)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
    bits = hashlib.sha256(" ".join(loss.hex() for loss in losses).encode())
    return Training(recipe, bits.hexdigest(), weights.hexdigest(), losses[0], losses[-1])


def _train_all(recipes: Sequence[str], steps: int, out: Path) -> None:
    import torch

    torch.use_deterministic_algorithms(True)  # with warn_only attention's backward is not
    out.write_text(json.dumps([train(recipe, steps) for recipe in recipes]))


# ---- in the process that compares ----------------------------------------------------------------


def trainings(commit: str, recipes: Sequence[str], steps: int) -> list[Training]:
    """The runs of a commit, one for each recipe."""
    from tests.support.compare_commits import checked_out

    with tempfile.TemporaryDirectory() as folder:
        tree, out = checked_out(commit, Path(folder) / "tree"), Path(folder) / "runs.json"
        caches = {
            name: str(Path(folder) / name.lower())
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "Q2COMPILE_CACHE_DIR")
        }
        packages = {"PYTHONPATH": str(tree / "installed"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, __file__, "--train", str(out), "--steps", str(steps)]
        command += ["--recipes", ",".join(recipes)]
        environment = {**os.environ, **caches, **packages}
        subprocess.run(command, env=environment, cwd=tree / "installed", check=True)
        return [Training(*run) for run in json.loads(out.read_text())]


def differing(runs: dict[str, list[Training]]) -> list[str]:
    """The recipes whose runs differ between commits."""
    return [same[0].recipe for same in zip(*runs.values(), strict=True) if len(set(same)) > 1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", help="two or more")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    recipes = arguments.recipes.split(",")
    if arguments.train:
        _train_all(recipes, arguments.steps, arguments.train)
        return 0
    if len(arguments.commits) < 2:
        parser.error("name at least two commits")
    runs: dict[str, list[Training]] = {}
    print("commit, recipe, first and last loss, hashes of all losses and of all weights")
    for commit in arguments.commits:
        runs[commit] = trainings(commit, recipes, arguments.steps)
        for run in runs[commit]:
            losses = f"{run.first:.6f} {run.last:.6f} {run.losses[:8]}"
            print(f"{commit:12} {run.recipe:10} {losses} {run.weights[:8]}", flush=True)
    found = differing(runs)
    print("differ: " + ", ".join(found) if found else "equal in every bit")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
