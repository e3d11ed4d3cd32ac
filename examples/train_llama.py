# SPDX-License-Identifier: Apache-2.0
"""Train the same Llama on the same text once per recipe, and compare the losses.

    python examples/train_llama.py
    python examples/train_llama.py --size 30m --data corpus/ --steps 5000 --batch 32 --seq 512
    torchrun --nproc-per-node 2 examples/train_llama.py --fsdp  # or --ddp, or --tp 2

The model is Hugging Face's `LlamaForCausalLM`, unmodified and randomly initialized. The runs differ
only in the options of `torch.compile(model, backend="quartet2", options=...)`. Every recipe,
including bf16, starts from the same weights and sees the same batches in the same order. The text
must fit into memory, and each start tokenizes it again. For runs of hours, `examples/pretrain.py`
has the same loop with a corpus on disk, checkpoints, several seeds and several devices.

These files are written into --out:
    losses.png, gaps.png, norms.png  curves of the loss, of the gap and of the gradient's norm
    RECIPE-seedN/losses.csv          one row per loss: step, split (train or val), loss, lr, seconds
    graphs/RECIPE/                   what the backend did with the model, stage by stage
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import several_gpus
import torch
from pretraining import results
from pretraining.comparison import Comparison, Data
from pretraining.model import SIZES
from pretraining.runs import Run, recipe
from pretraining.text import encode, read_text, text_files, train_tokenizer
from pretraining.training import Rhythm, Setup

import q2compile

# By device: --size, --batch and --seq. On a GPU, layers are as wide as FP8 and FP4 need to pay off.
DEFAULTS = {"cpu": ("demo", 4, 256), "cuda": ("wide", 16, 512)}
VALIDATION_SHARE = 0.05  # of the text, held out before the tokenizer is trained


def read_documents(path: Path | None) -> list[str]:
    """Read a file, or every UTF-8 file of a folder. Without a path, read Python's sources."""
    texts = (read_text(file) for file in text_files([path] if path else []))
    documents = [text for text in texts if text is not None]
    if not documents:
        raise ValueError(f"--data {path}: no UTF-8 text found there")
    return documents


def split_text(documents: list[str], seed: int) -> tuple[str, str]:
    """Shuffle the documents, and split them into (training text, validation text)."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    text = "\n".join(shuffled)
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]


def draw_batches(tokens: torch.Tensor, count: int, batch: int, seq: int, seed: int) -> torch.Tensor:
    """Draw windows of `tokens` at random places, as int64 [count, batch, seq].

    They are drawn once for all runs, so that the order of the data cannot differ.
    """
    if len(tokens) < seq:
        raise ValueError(
            f"the text has {len(tokens)} tokens, fewer than --seq {seq}: give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - seq + 1, (count, batch, 1), generator=generator)
    return tokens[starts + torch.arange(seq)]


def load_data(args: argparse.Namespace, say: Callable[[str], None] = print) -> tuple[Data, int]:
    """Return (the batches for every recipe, vocabulary size)."""
    source = args.data or "Python's standard library"
    say(f"reading {source}, training a tokenizer of {args.vocab} entries")
    texts = split_text(read_documents(args.data), args.seed)
    tokenizer = train_tokenizer(texts[:1], args.vocab)
    train, val = (
        torch.cat([torch.from_numpy(part.astype("int64")) for part in encode(tokenizer, [text])])
        for text in texts
    )
    say(
        f"{len(train):,} tokens to train on, {len(val):,} held out; "
        f"{args.steps} steps of {args.batch} x {args.seq} tokens on {args.device}"
    )
    train_set = draw_batches(train, args.steps, args.batch, args.seq, args.seed)
    val_set = draw_batches(val, args.eval_batches, args.batch, args.seq, args.seed)
    facts = {"source": str(source), "train_tokens": len(train), "val_tokens": len(val)}
    return Data(lambda seed: train_set, val_set, facts), tokenizer.get_vocab_size()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object such as {"strict": true}')
    return value


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--recipes", default="bf16,quartet2", help="comma-separated; the first is the baseline")
    text = "a text file or a folder of text files, instead of Python's sources"
    add("--data", type=Path, help=text)
    add("--out", type=Path, default=Path("runs/train_llama"), help="the folder to write into")
    add("--size", choices=SIZES, help="model size: demo on a CPU, wide on a GPU")
    add("--steps", type=positive, default=120, help="steps to train")
    add("--batch", type=positive, help="sequences per step: 4 on a CPU, 16 on a GPU")
    add("--seq", type=positive, help="tokens per sequence: 256 on a CPU, 512 on a GPU")
    add("--vocab", type=positive, default=1024, help="vocabulary size; 256 means plain bytes")
    add("--lr", type=float, help="peak learning rate, if not the one for --size")
    add("--seed", type=int, default=0, help="seed of the weights, data order and rounding")
    add("--rounding-seed", type=int, help="seed of the rounding, if not --seed")
    add("--eval-every", type=positive, default=30, help="steps between two validations")
    add("--eval-batches", type=positive, default=8, help="batches per validation")
    add("--device", default="auto", help="auto uses CUDA if there is a device")
    text = "a TOML or JSON file of compile options, as Q2COMPILE_CONFIG names one"
    add("--config", type=Path, help=text)
    add(
        "--compile-options",
        type=json_object,
        default={},
        metavar="JSON",
        help="compile options, which override those of --config and of this program",
    )
    several_gpus.add_arguments(parser)
    args = parser.parse_args(argv)
    args.recipes = [name.strip() for name in args.recipes.split(",") if name.strip()]
    if not args.recipes:
        parser.error("--recipes: name at least one recipe")
    if args.vocab < 256:
        parser.error(f"--vocab: got {args.vocab}; allowed: 256 or more, one entry per byte")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    size, batch, seq = DEFAULTS["cuda" if args.device.startswith("cuda") else "cpu"]
    args.size, args.batch, args.seq = args.size or size, args.batch or batch, args.seq or seq
    return args


def recipes(args: argparse.Namespace) -> list[Run]:
    """Return one run per recipe. With --config, this program adds no policy of its own.

    A wrong recipe or option raises a ValueError here, before any run has started.
    """
    if args.config is not None:
        os.environ["Q2COMPILE_CONFIG"] = str(args.config)
    runs = [Run(n, {"recipe": n} if args.config else recipe(n)) for n in args.recipes]
    for run in runs:
        options = run.compile_options(SIZES[args.size].layers)
        q2compile.Config.from_options({**options, **args.compile_options})
    return runs


def print_where_to_look(args: argparse.Namespace, team: several_gpus.Team) -> None:
    print(f"loss curves: {args.out / 'losses.png'}")
    for name in args.recipes:
        print(f"{name} losses: {results.run_folder(args.out, name, args.seed) / 'losses.csv'}")
        folder = args.out / "graphs" / name
        if team.size > 1:
            folder /= f"rank{team.rank}"
        if (folder / "report.json").exists():
            subprocess.run(
                [sys.executable, "-m", "q2compile.tools.cli", "report", str(folder)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            print(f"{name} report: {folder / 'report.html'} (as text: report.txt)")
            print(f"{name} graphs: {folder}, with one folder per graph and one file per stage")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        runs = recipes(args)
        team = several_gpus.Team(args)
        data, vocab = load_data(args, team.say)
    except ValueError as error:
        print(f"train_llama.py: {error}", file=sys.stderr)
        return 2
    comparison = Comparison(
        folder=args.out,
        setup=Setup(
            size=args.size,
            vocab=vocab,
            steps=args.steps,
            batch=args.batch,
            seq=args.seq,
            device=args.device,
            lr=args.lr,
            rounding_seed=args.rounding_seed,
            compile_options=args.compile_options,
        ),
        rhythm=Rhythm(eval_every=args.eval_every),
        data=data,
        team=team,
        command=shlex.join(["train_llama.py", *(sys.argv[1:] if argv is None else argv)]),
        dump=True,
    )
    done: list[results.Finished] = []
    for run in runs:
        done += comparison.train(run, [args.seed])
        if team.leads:
            table = results.write(done, args.out, f"Llama {args.size}, {args.steps} steps")
    if team.leads:
        print(table)
        print_where_to_look(args, team)
    team.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
