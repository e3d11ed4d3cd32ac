# SPDX-License-Identifier: Apache-2.0
"""The jobs of `train`: comparisons, from the command line or from a plan in TOML.

[[run]]           a run of the plan's own: the fields of `runs.Run`
[[comparison]]    the fields of `Job`
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from several_gpus import Team

from pretraining.batches import Windows
from pretraining.branching import Branch
from pretraining.comparison import Comparison, Data
from pretraining.corpus import Corpus
from pretraining.training import Rhythm, Setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FETCH_EVERY = 50  # steps, on a GPU


@dataclass(frozen=True)
class Job:
    """Runs of a comparison: a table of the plan, or what the command line asks for.

    branch_at: see --branch-at.
    """

    folder: str
    runs: list[str]
    seeds: list[int]
    tokens: float
    size: str
    branch_at: float | None = None


def jobs(args: argparse.Namespace) -> list[Job]:
    """Raises ValueError for a plan that has something else in it than the fields of `Job`, or that
    lacks one of --folders.

    A plan's own runs, its [[run]] tables, are given to `runs.parse` as NAME=JSON.
    """
    if args.plan is None:
        return [Job("", args.runs, args.seeds, args.tokens, args.size, args.branch_at)]
    plan = tomllib.loads(args.plan.read_text(encoding="utf-8"))
    own = {run["name"]: own_run(run) for run in plan.get("run", [])}
    defaults = {"seeds": args.seeds, "tokens": args.tokens, "size": args.size}
    defaults["branch_at"] = args.branch_at
    try:
        asked = [Job(**{**defaults, **row}) for row in plan["comparison"]]
    except TypeError as error:
        raise ValueError(
            f"--plan {args.plan}: {error}; a [[comparison]] has folder, runs, and if wanted seeds, "
            "tokens, size, branch_at"
        ) from None
    if args.folders:
        if unknown := set(args.folders) - {job.folder for job in asked}:
            there = ", ".join(sorted({job.folder for job in asked}))
            raise ValueError(f"--folders {','.join(sorted(unknown))}: {args.plan} has {there}")
        asked = [job for job in asked if job.folder in args.folders]
    return [replace(job, runs=[own.get(name, name) for name in job.runs]) for job in asked]


def own_run(fields: dict[str, Any]) -> str:
    """NAME=JSON of a plan's [[run]]."""
    return f"{fields['name']}={json.dumps({k: v for k, v in fields.items() if k != 'name'})}"


def branch(args: argparse.Namespace, job: Job, steps: int) -> Branch | None:
    """Raises ValueError for a step that is not inside of the run."""
    if job.branch_at is None:
        return None
    step = round(job.branch_at * steps if job.branch_at < 1 else job.branch_at)
    if not 0 < step < steps:
        raise ValueError(
            f"--branch-at {job.branch_at:g}: a run of {steps} steps branches after step 1 to "
            f"{steps - 1}, or a share of them between 0 and 1"
        )
    return Branch(step, args.stems or args.out / "stems")


def comparison(args: argparse.Namespace, job: Job, corpus: Corpus) -> Comparison:
    per_step = args.batch * args.seq
    steps = max(1, round(job.tokens / per_step))
    eager = args.oracle or args.compile_options.get("inner") == "eager"  # has no modes
    options = {"mode": args.mode} if args.mode and not eager else {}
    setup = Setup(
        size=job.size,
        vocab=corpus.facts.vocab,
        steps=steps,
        batch=args.batch,
        seq=args.seq,
        device=args.device,
        lr=args.lr,
        rounding_seed=args.rounding_seed,
        oracle=args.oracle,
        compile_options={**options, **args.compile_options},
    )
    rhythm = Rhythm(
        eval_every=math.ceil(steps / args.evals),
        eval_batches=args.eval_batches,
        fetch_every=FETCH_EVERY if args.device.startswith("cuda") else 1,
        save_every=args.save_every,
        keep=args.keep,
        stop_at=args.stop_at,
        deadline=args.deadline,
    )
    val_batches = min(len(corpus.val), args.val_tokens or len(corpus.val)) // per_step
    if not val_batches:
        held_out = f"{len(corpus.val):,} tokens held out"
        asked = f", --val-tokens {args.val_tokens:,}" if args.val_tokens else ""
        raise ValueError(f"{held_out}{asked}, less than a batch of {per_step:,}")

    def train(seed: int) -> Windows:
        return Windows(corpus.train, steps, args.batch, args.seq, seed)

    facts = {
        "corpus": corpus.facts.hash,
        "name": corpus.facts.name,
        "tokens": steps * per_step,
        "epochs": round(train(0).epochs, 3),
        "val_tokens": val_batches * per_step,
    }
    val = Windows(corpus.val, val_batches, args.batch, args.seq, None)
    folder = args.out / job.folder
    alone = Team(argparse.Namespace(**vars(args), fsdp=False, ddp=False, tp=1))
    data, left = Data(train, val, facts), branch(args, job, steps)
    return Comparison(folder, setup, rhythm, data, alone, args.asked, args.dump, left)
