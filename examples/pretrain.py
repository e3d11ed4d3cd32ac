# SPDX-License-Identifier: Apache-2.0
"""Pre-train small Llamas recipe beside recipe, and measure the gaps.

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

`train` may be stopped or killed at any moment: the same command goes on from the last checkpoints,
and a run that went on has the same bits as one that was never stopped. Every run of a seed starts
from the same weights and sees the same batches.

--runs takes names of the table in examples/pretraining/runs.py, recipes of q2compile, and runs of
your own as NAME={"options": {...}}, in JSON.

Written into --out, or into a folder in it for each comparison of the plan:
    RUN-seedN/losses.csv, result.json    a row a step; what the run came to
    table.txt                            the table that is printed
    losses.png, gaps.png, norms.png      the curves, with a band over the seeds
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
    """Refuse a wrong run or option now rather than after the runs before it."""
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
        print(f"\n{stopped}; the same command goes on from there", flush=True)
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
    """The missing stems, spread over the devices: a process compiles once for all of its own."""
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
    """Run them on the devices; the exit status of all, STOPPED where they only ran out of time."""
    statuses = devices.run_all(commands, args.devices, args.deadline, between)
    for index, status in sorted(statuses.items()):
        if status:
            what = "unfinished" if status == devices.STOPPED else f"exit status {status}"
            print(f"{what}: {shlex.join(commands[index])}", flush=True)
    failed = [s for s in statuses.values() if s]
    return next((s for s in failed if s != devices.STOPPED), devices.STOPPED) if failed else 0


def command_of_one(args: argparse.Namespace, job: Job) -> list[str]:
    """`train` with all of this command's settings, but for runs, options, out and device."""
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
    """A function that makes table and pictures of a folder again when a run of it has ended."""
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
    """Comma-separated; commas in the JSON of a run of one's own do not count."""
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

    add_corpus(command("corpus", "build a corpus: token files out of texts"))
    add_train(command("train", "train runs x seeds on a corpus"))
    add_page(command("page", "gaps.json and tables.md of runs that ended", page.__doc__))
    help = "the loop's tokens/s over those of the bare compiled step"
    add_throughput(command("throughput", help))
    help = "a seed trained in ways that should be one: where the losses differ"
    add_stability(command("stability", help, stability.__doc__))
    help = "the error of each operand on a run's own tensors, recipe by recipe"
    add_operands(command("operands", help, operands.__doc__))
    args = parser.parse_args(argv)
    args.asked = getattr(args, "asked", None) or shlex.join(["pretrain.py", *argv])
    return args


def add_corpus(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="*", default=[], help="files and folders; else Python's sources")
    add("--out", type=Path, required=True, help="folder of the corpus")
    add("--name", default="text", help="what results call it")
    add("--vocab", type=positive, default=4096, help="entries of the tokenizer that is trained")
    add("--val-bytes", type=positive, default=32e6, help="text held out, at least")
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
    add("--corpus", type=Path, required=True, help="folder that `corpus` built")
    text = "comma-separated, see `pretrain.py --help`; by default bf16,quartet2"
    add("--runs", type=names, default=["bf16", "quartet2"], help=text)
    text = "folder for everything written, by default %(default)s"
    add("--out", type=Path, default=Path("runs/pretrain"), help=text)
    add("--size", choices=SIZES, default="30m", help="of the Llama, by default %(default)s")
    add("--batch", type=positive, default=64, help="sequences per step, by default %(default)s")
    add("--seq", type=positive, default=512, help="tokens per sequence, by default %(default)s")
    add("--lr", type=float, help="peak learning rate; by default the size's")
    add("--evals", type=positive, default=10, help="validations of a run, by default %(default)s")
    text = "batches of a validation on the way; the last one takes all of --val-tokens"
    add("--eval-batches", type=positive, default=16, help=text)
    add("--val-tokens", type=positive, help="held-out tokens to validate on; by default all")
    add("--mode", help="Inductor's mode, reduce-overhead for example")
    add("--compile-options", type=json.loads, default={}, metavar="JSON", help="for all runs")
    text = "only kernels that repeat their bits; an error where there is none"
    add("--deterministic", action="store_true", help=text)
    add("--rounding-seed", type=int, help="seed of the rounding; by default the run's")
    text = "linears by the torch references in fp32, nothing compiled: what numerics alone say"
    add("--oracle", action="store_true", help=text)
    add("--device", default="auto", help="auto takes CUDA when there is one")
    text = "cuda:0,cuda:1,...: a process for each entry, taking the next run"
    add("--devices", help=text)


def add_train(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add = parser.add_argument
    add("--seeds", type=numbers, default=[0], help="comma-separated")
    add("--plan", type=Path, help="TOML with a [[comparison]] a folder: folder, runs, seeds, ...")
    text = "comma-separated: of the plan, these comparisons alone"
    add("--folders", type=lambda text: text.split(","), default=[], help=text)
    add("--tokens", type=float, default=75e6, help="to train on, by default 75e6")
    text = "train the first steps once per seed, in BF16, and let every run go on from there: a "
    text += "step, or a share of the steps below 1"
    add("--branch-at", type=float, metavar="STEP", help=text)
    text = "folder of what runs branch from, by default OUT/stems; each is trained once"
    add("--stems", type=Path, metavar="FOLDER", help=text)
    add("--dump", action="store_true", help="write graphs and reports into OUT/graphs")
    add("--keep", action="store_true", help="keep the checkpoint of the last step")
    add("--save-every", type=float, default=SAVE_EVERY, help="seconds between two checkpoints")
    add("--time-limit", type=float, default=math.inf, help="seconds after which to stop, resumably")
    add("--stop-at", type=positive, help="step after which to leave, with a checkpoint")
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
    add("--of", type=Path, help="the --out of a plan; without it the gaps.json that is there")
    text = "runs beside other work on their device, whose times are left out: 75M/bf16-seed0,..."
    add("--untimed", type=names, default=[], metavar="RUNS", help=text)
    add("--into", type=Path, default=results_folder, help="folder for what is written")
    parser.set_defaults(main=write_page)


def write_page(args: argparse.Namespace) -> int:
    print(*page.write(args.into, args.of, args.untimed), sep="\n")
    return 0


def add_throughput(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    parser.add_argument("--steps", type=positive, default=200, help="timed, of each")
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
    text = "of each variant, by default %(default)s"
    parser.add_argument("--steps", type=positive, default=200, help=text)
    text = f"comma-separated, of {', '.join(stability.VARIANTS)}; by default all"
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
        raise ValueError(f"--variants {','.join(unknown)}: allowed are {allowed}")
    stability.train(args.runs, variants, args.steps, args.out, command, run_all)
    found = stability.differences(args.runs, variants, args.out)
    print(*found, *stability.gaps(args.runs, variants, args.out), sep="\n", flush=True)
    return 0


def add_operands(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder that `corpus` built")
    add("--checkpoint", type=Path, required=True, help="of a run; `train --keep` leaves it")
    text = "comma-separated, see `pretrain.py --help`; by default quartet2,nvfp4,tetrajet2"
    add("--runs", type=names, default=["quartet2", "nvfp4", "tetrajet2"], help=text)
    text = "held-out batches to measure on, by default %(default)s"
    add("--batches", type=positive, default=4, help=text)
    add("--batch", type=positive, help="sequences of each; by default the run's")
    text = "what runs the graphs that are measured; eager compiles nothing and starts sooner"
    add("--inner", choices=("inductor", "eager"), default="inductor", help=text)
    text = "also each module alone: which kinds of layers make the gradient's error"
    add("--alone", action="store_true", help=text)
    add("--device", default="auto", help="auto takes CUDA when there is one")
    add("--out", type=Path, default=Path("runs/operands"), help="folder of operands.json")
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
