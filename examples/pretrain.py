# SPDX-License-Identifier: Apache-2.0
"""Pretrain small Llamas with several recipes, and measure the gaps between their losses.

    python examples/pretrain.py corpus --data texts/ more.txt --out corpus/
    python examples/pretrain.py train --corpus corpus/ --runs bf16,quartet2,nvfp4 --seeds 0,1,2 \\
        --size 30m --tokens 75e6 --mode reduce-overhead --out runs/30m
    python examples/pretrain.py train --corpus corpus/ --plan examples/pretraining/plans.toml \\
        --folders 75M,305M --devices cuda:0,cuda:1 --time-limit 540 --out runs/table

    python examples/pretrain.py page --of runs/table
    python examples/pretrain.py throughput --corpus corpus/ --runs bf16 --mode reduce-overhead
    python examples/pretrain.py stability --corpus corpus/ --runs bf16,quartet2 --steps 200
    python examples/pretrain.py operands --corpus corpus/ --runs quartet2,nvfp4 \\
        --checkpoint runs/30m/bf16-seed0/checkpoint.pt

`train` may be stopped or killed at any time. The same command continues from the last checkpoints,
and the losses of a run that was resumed have the same bits as without the interruption. All runs of
a seed start from the same weights and see the same batches.

--runs takes names from the table in examples/pretraining/runs.py, recipes of q2compile, and runs of
your own in JSON, as NAME={"options": {...}}.

These files are written into --out, or for a plan into one folder of it per comparison:
    RUN-seedN/losses.csv, result.json    one row per step; the final result of the run
    table.txt                            the table that is printed
    losses.png, gaps.png, norms.png      the curves, with a band that spans the seeds
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pretraining import devices, operands, page, results, runs, stability, throughput
from pretraining.batches import Windows
from pretraining.comparison import Comparison, environment
from pretraining.corpus import Corpus, build
from pretraining.model import SIZES
from pretraining.plan import Job, comparison, jobs
from pretraining.record import without_folders
from pretraining.training import Setup, Stopped

import q2compile

SAVE_EVERY = 120.0  # seconds


def check(asked: Sequence[tuple[Job, Comparison]]) -> None:
    """Raise a ValueError for a wrong run or option before any run has started."""
    for job, compared in asked:
        for name in job.runs:
            run = runs.parse(name)
            for late in (False, True):
                q2compile.Config.from_options(compared.setup.options(run, late))


def show(folder: Path, setup: Setup) -> None:
    title = f"Llama {setup.size}, {setup.steps * setup.batch * setup.seq / 1e6:.0f}M tokens"
    done = results.finished(folder)
    if done:
        print(f"\n{title}\n{results.write(done, folder, title)}", flush=True)


# ------------------------------------------------------------------------------------------ train


def train(args: argparse.Namespace) -> int:
    corpus = Corpus.open(args.corpus)
    asked = [(job, comparison(args, job, corpus)) for job in jobs(args)]
    check(asked)
    if len(args.devices) > 1:
        return train_on_many(args, asked, corpus)
    if not args.quiet:
        corpus.check()
        print(corpus.facts, flush=True)
    try:
        for job, compared in asked:
            compared.train_stems(job.seeds, args.bar)
            for name in [] if args.stems_only else job.runs:
                for _ in compared.train(runs.parse(name), job.seeds, args.bar):
                    if not args.quiet:
                        show(compared.folder, compared.setup)
    except Stopped as stopped:
        print(f"\n{stopped}; the same command continues from there", flush=True)
        return devices.STOPPED
    return 0


def train_on_many(
    args: argparse.Namespace, asked: Sequence[tuple[Job, Comparison]], corpus: Corpus
) -> int:
    corpus.check()
    print(corpus.facts, flush=True)
    status = run_commands(args, stem_commands(args, asked), lambda: None)
    if status or args.stems_only:
        return status
    commands = [
        [*command_of_one(args, job), "--runs", name, "--out", str(args.out / job.folder)]
        + ["--compile-options", json.dumps(args.compile_options)]
        for job, compared in asked
        for name in job.runs
        if not all(compared.is_finished(runs.parse(name), seed) for seed in job.seeds)
    ]
    refresh = refresher([compared for _, compared in asked])
    status = run_commands(args, commands, refresh)
    refresh()
    return status


def stem_commands(
    args: argparse.Namespace, asked: Sequence[tuple[Job, Comparison]]
) -> list[list[str]]:
    """Commands that train the missing stems, one per device, so that each compiles only once."""
    commands, taken = [], set[Path | None]()
    for job, compared in asked:
        missing = [
            s for s in compared.missing_stems(job.seeds) if stem_of(compared, s) not in taken
        ]
        taken |= {stem_of(compared, seed) for seed in missing}
        for first in range(min(len(missing), len(args.devices))):
            share = replace(job, seeds=missing[first :: len(args.devices)])
            command = [*command_of_one(args, share), "--stems-only", "--out", str(args.out)]
            command += ["--compile-options", json.dumps(args.compile_options)]
            commands.append(command)
    return commands


def stem_of(compared: Comparison, seed: int) -> Path | None:
    stem = compared.stem(seed)
    return None if stem is None else stem.folder


def run_commands(
    args: argparse.Namespace, commands: Sequence[Sequence[str]], between: Callable[[], None]
) -> int:
    """Run commands on the devices. Return 0, the status of one that failed, or STOPPED if the
    only problem was the time limit."""
    statuses = devices.run_all(commands, args.devices, args.deadline, between)
    for index, status in sorted(statuses.items()):
        if status:
            what = "unfinished" if status == devices.STOPPED else f"exit status {status}"
            print(f"{what}: {shlex.join(commands[index])}", flush=True)
    failed = [s for s in statuses.values() if s]
    return next((s for s in failed if s != devices.STOPPED), devices.STOPPED) if failed else 0


def command_of_one(args: argparse.Namespace, job: Job) -> list[str]:
    """Return `train` with all settings of this command except runs, options, out and device."""
    command = [*devices.this_program(), "train", "--quiet", "--corpus", str(args.corpus)]
    command += ["--seeds", ",".join(map(str, job.seeds)), "--tokens", str(job.tokens)]
    own = ("batch", "seq", "evals", "eval_batches", "val_tokens", "save_every", "mode", "lr")
    for name in (*own, "rounding_seed"):
        value = getattr(args, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    if job.branch_at is not None:
        command += ["--branch-at", str(job.branch_at)]
        command += ["--stems", str(args.stems or args.out / "stems")]
    flags = [
        f"--{name}" for name in ("dump", "keep", "deterministic", "oracle") if getattr(args, name)
    ]
    return [*command, "--size", job.size, *flags, "--asked", args.asked]


def refresher(comparisons: Sequence[Comparison]) -> Callable[[], None]:
    """Return a function that updates a folder's table and pictures after one of its runs ended."""
    folders = {compared.folder: compared.setup for compared in comparisons}
    shown: dict[Path, int] = {}

    def refresh() -> None:
        for folder, setup in folders.items():
            count = len(list(folder.glob("*/result.json")))
            if count > shown.get(folder, 0):
                shown[folder] = count
                show(folder, setup)

    return refresh


# ------------------------------------------------------------------------------------------- main


def positive(text: str) -> int:
    value = int(float(text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def names(text: str) -> list[str]:
    """Split at commas, except those inside the JSON of a run of your own."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [name.strip() for name in found if name.strip()]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, about: str | None = None) -> argparse.ArgumentParser:
        about = about or f"{help[0].upper()}{help[1:]}."
        return commands.add_parser(name, help=help, description=about, formatter_class=as_written)

    add_corpus(command("corpus", "build a corpus: tokenize texts into files"))
    add_train(command("train", "train every run with every seed on a corpus"))
    add_page(command("page", "write gaps.json and tables.md for finished runs", page.__doc__))
    help = "compare the tokens per second of the training loop with those of the compiled step"
    add_throughput(command("throughput", help))
    help = "train one seed in ways that should not differ, and show where the losses do"
    add_stability(command("stability", help, stability.__doc__))
    help = "measure each recipe's error of each operand, on the tensors of a trained run"
    add_operands(command("operands", help, operands.__doc__))
    args = parser.parse_args(argv)
    args.asked = getattr(args, "asked", None) or shlex.join(["pretrain.py", *argv])
    return args


def add_corpus(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "files and folders; default: Python's sources"
    add("--data", type=Path, nargs="*", default=[], help=text)
    add("--out", type=Path, required=True, help="the folder to write the corpus into")
    add("--name", default="text", help="the name of the corpus in results")
    add("--vocab", type=positive, default=4096, help="vocabulary size of the tokenizer")
    add("--val-bytes", type=positive, default=32e6, help="hold out at least this much text")
    add("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    parser.set_defaults(main=make_corpus)


def make_corpus(args: argparse.Namespace) -> int:
    print(
        build(
            args.data,
            args.out,
            name=args.name,
            vocab=args.vocab,
            val_bytes=int(args.val_bytes),
            tokenizer_file=args.tokenizer,
        )
    )
    return 0


def add_setup(parser: argparse.ArgumentParser) -> None:
    """Arguments that define one run."""
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="the folder that `corpus` wrote")
    text = "comma-separated, see `pretrain.py --help`; default bf16,quartet2"
    add("--runs", type=names, default=["bf16", "quartet2"], help=text)
    text = "the folder to write into; default %(default)s"
    add("--out", type=Path, default=Path("runs/pretrain"), help=text)
    add("--size", choices=SIZES, default="30m", help="model size; default %(default)s")
    add("--batch", type=positive, default=64, help="sequences per step; default %(default)s")
    add("--seq", type=positive, default=512, help="tokens per sequence; default %(default)s")
    add("--lr", type=float, help="peak learning rate; the default depends on --size")
    add("--evals", type=positive, default=10, help="validations per run; default %(default)s")
    text = "batches per validation; the last validation uses all of --val-tokens"
    add("--eval-batches", type=positive, default=16, help=text)
    add("--val-tokens", type=positive, help="held-out tokens to validate on; default: all")
    add("--mode", help="a mode of Inductor, such as reduce-overhead")
    text = "options for all runs"
    add("--compile-options", type=json.loads, default={}, metavar="JSON", help=text)
    text = "use deterministic kernels only; an op that has none raises an error"
    add("--deterministic", action="store_true", help=text)
    add("--rounding-seed", type=int, help="seed of the rounding; default: the run's seed")
    text = "compile nothing, and run the linears as torch references in fp32, to see what the "
    text += "numerics do without the compiler"
    add("--oracle", action="store_true", help=text)
    add("--device", default="auto", help="auto uses CUDA if there is a device")
    text = "cuda:0,cuda:1,...: start one process per entry; each takes the next run"
    add("--devices", help=text)


def add_train(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add = parser.add_argument
    add("--seeds", type=numbers, default=[0], help="comma-separated")
    text = "a TOML file with one [[comparison]] per folder: folder, runs, seeds, ..."
    add("--plan", type=Path, help=text)
    text = "run only these comparisons of the plan; comma-separated"
    add("--folders", type=lambda text: text.split(","), default=[], help=text)
    add("--tokens", type=float, default=75e6, help="tokens to train on; default 75e6")
    text = "train the first steps once per seed, in BF16, and start every run from there: a "
    text += "step, or a share of the steps below 1"
    add("--branch-at", type=float, metavar="STEP", help=text)
    text = "the folder of the BF16 runs that others branch from; default OUT/stems"
    add("--stems", type=Path, metavar="FOLDER", help=text)
    add("--dump", action="store_true", help="write graphs and reports into OUT/graphs")
    add("--keep", action="store_true", help="keep the checkpoint of the last step")
    add("--save-every", type=float, default=SAVE_EVERY, help="seconds between two checkpoints")
    text = "stop after so many seconds; the same command resumes"
    add("--time-limit", type=float, default=math.inf, help=text)
    add("--stop-at", type=positive, help="stop after this step, with a checkpoint")
    # For one process of --devices: no tables, its line on the terminal, when all are to leave, and
    # the command that was typed.
    add("--quiet", action="store_true", help=argparse.SUPPRESS)
    add("--bar", type=int, default=0, help=argparse.SUPPRESS)
    add("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    add("--asked", help=argparse.SUPPRESS)
    add("--stems-only", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(main=start_training)


def choose_device(args: argparse.Namespace) -> None:
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.devices = args.devices.split(",") if args.devices else [args.device]
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Attention's kernels repeat their bits only where others would be an error.
        torch.use_deterministic_algorithms(True)


def start_training(args: argparse.Namespace) -> int:
    choose_device(args)
    args.deadline = min(args.until, time.time() + args.time_limit)
    return train(args)


def add_page(parser: argparse.ArgumentParser) -> None:
    results_folder = Path(__file__).resolve().parent / "pretraining" / "results"
    add = parser.add_argument
    add("--of", type=Path, help="the --out of a plan; default: use the gaps.json of --into")
    text = "leave out the times of these runs, which shared their device: 75M/bf16-seed0,..."
    add("--untimed", type=names, default=[], metavar="RUNS", help=text)
    add("--into", type=Path, default=results_folder, help="the folder to write into")
    parser.set_defaults(main=write_page)


def write_page(args: argparse.Namespace) -> int:
    print(*page.write(args.into, args.of, args.untimed), sep="\n")
    return 0


def add_throughput(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    parser.add_argument("--steps", type=positive, default=200, help="steps to time per run")
    parser.set_defaults(main=measure_throughput, save_every=None, keep=False)
    parser.set_defaults(stop_at=None, dump=False)


def measure_throughput(args: argparse.Namespace) -> int:
    choose_device(args)
    args.deadline = math.inf
    corpus = Corpus.open(args.corpus)
    job = Job("", args.runs, [0], args.steps * args.batch * args.seq, args.size)
    for name in args.runs:
        print(throughput.measure(comparison(args, job, corpus), runs.parse(name)), flush=True)
    return 0


def add_stability(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    text = "steps per variant; default %(default)s"
    parser.add_argument("--steps", type=positive, default=200, help=text)
    text = f"comma-separated, from {', '.join(stability.VARIANTS)}; default: all"
    variants = list(stability.VARIANTS)
    parser.add_argument("--variants", type=names, default=variants, help=text)
    parser.set_defaults(main=compare_ways, save_every=1e9, keep=False, dump=False)


def compare_ways(args: argparse.Namespace) -> int:
    choose_device(args)
    job = Job("", args.runs, [0], args.steps * args.batch * args.seq, args.size)
    command = command_of_one(args, job)

    def run_all(commands: Sequence[Sequence[str]]) -> None:
        statuses = devices.run_all(commands, args.devices, math.inf, lambda: None)
        for index, status in statuses.items():
            if status not in (0, devices.STOPPED):
                raise ValueError(f"exit status {status} of {shlex.join(commands[index])}")

    variants = ["compiled", *(v for v in args.variants if v != "compiled")]
    if unknown := [v for v in variants if v not in stability.VARIANTS]:
        allowed = ", ".join(stability.VARIANTS)
        raise ValueError(f"--variants: got {','.join(unknown)}; allowed: {allowed}")
    stability.train(args.runs, variants, args.steps, args.out, command, run_all)
    found = stability.differences(args.runs, variants, args.out)
    print(*found, *stability.gaps(args.runs, variants, args.out), sep="\n", flush=True)
    return 0


def add_operands(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="the folder that `corpus` wrote")
    text = "the checkpoint of a run, which `train --keep` leaves"
    add("--checkpoint", type=Path, required=True, help=text)
    text = "comma-separated, see `pretrain.py --help`; default quartet2,nvfp4,tetrajet2"
    add("--runs", type=names, default=["quartet2", "nvfp4", "tetrajet2"], help=text)
    text = "held-out batches to measure on; default %(default)s"
    add("--batches", type=positive, default=4, help=text)
    add("--batch", type=positive, help="sequences per batch; default: as in training")
    text = "how to run the measured graphs; eager compiles nothing and starts sooner"
    add("--inner", choices=("inductor", "eager"), default="inductor", help=text)
    text = "also quantize each module by itself, to see which layers cause the gradient's error"
    add("--alone", action="store_true", help=text)
    add("--device", default="auto", help="auto uses CUDA if there is a device")
    add("--out", type=Path, default=Path("runs/operands"), help="the folder for operands.json")
    parser.set_defaults(main=measure_operands, devices=None, deterministic=False)


def measure_operands(args: argparse.Namespace) -> int:
    choose_device(args)
    corpus = Corpus.open(args.corpus)
    trained = operands.Trained.load(args.checkpoint, args.device)
    batch, seq = args.batch or trained.setup["batch"], trained.setup["seq"]
    count = min(args.batches, len(corpus.val) // (batch * seq))
    held_out = Windows(corpus.val, count, batch, seq, None)
    batches = [held_out[index].to(args.device) for index in range(count)]
    facts = {"run": trained.run, "step": trained.step, "setup": trained.setup}
    facts |= {"corpus": corpus.facts.hash, "command": without_folders(args.asked)}
    facts |= environment()
    found = []
    for run in [runs.parse(name) for name in args.runs]:
        found.append(operands.measure(trained, run, batches, args.device, args.inner, args.alone))
        operands.write(found, facts, args.out / "operands.json")
    print(f"{trained.run}, {trained.setup['size']}, after step {trained.step}")
    print(operands.table(found), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return args.main(args)
    except ValueError as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
