"""Train the same Llama on the same text once per recipe, and compare.

    python examples/train_llama.py
    python examples/train_llama.py --size 30m --data corpus/ --steps 5000 --batch 32 --seq 512
    torchrun --nproc-per-node 2 examples/train_llama.py --fsdp  # or --ddp, or --tp 2

The model is Hugging Face's `LlamaForCausalLM`, unmodified and randomly initialised; the options of
`torch.compile(model, backend="quartet2", options=...)` are the only difference between the runs.
Every recipe, bf16 among them, starts from the same weights, sees the same batches in the same
order, and trains as in the Quartet II paper (arXiv 2601.22813): fp32 masters under bf16 autocast,
AdamW(0.9, 0.95), weight decay 0.1, gradients clipped at norm 1.0, and 10% of warm-up followed by a
cosine to zero.

Written into --out:
    losses.csv      one row per loss: recipe, step, split (train or val), loss, lr, seconds
    losses.png      the curves
    graphs/RECIPE/  what the backend did with the model, stage by stage, with a report
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import several_gpus
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import q2compile

VALIDATION_SHARE = 0.05  # of the text, held out before the tokenizer is trained
WARMUP_SHARE = 0.1  # of the steps
ENCODE_CHARS = 1 << 16  # the tokenizer works on pieces of this many characters, in parallel
UNTIMED_STEPS = 2  # the first step of a run compiles, the second still allocates


@dataclass(frozen=True)
class ModelSize:
    """The shape of a Llama and the peak learning rate it trains with."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    learning_rate: float


# 30m is the paper's smallest model. demo and 100m are this example's own choices; demo is wide and
# shallow so that on a CPU its time goes into matrix products and little of it into compiling.
SIZES = {
    "tiny": ModelSize(hidden=64, layers=1, heads=2, intermediate=128, learning_rate=3e-3),
    "demo": ModelSize(hidden=512, layers=2, heads=8, intermediate=1536, learning_rate=5e-4),
    "30m": ModelSize(hidden=640, layers=6, heads=5, intermediate=1792, learning_rate=1.2e-3),
    "100m": ModelSize(hidden=1024, layers=8, heads=8, intermediate=2816, learning_rate=6e-4),
}


@dataclass(frozen=True)
class Point:
    """One row of losses.csv."""

    recipe: str
    step: int
    split: str  # train: the loss of one batch; val: the mean over the validation batches
    loss: float  # nats per token
    lr: float
    seconds: float  # of the training step, or of the evaluation


@dataclass
class Run:
    """What one recipe's training run produced."""

    recipe: str
    points: list[Point] = field(default_factory=list)

    def losses(self, split: str) -> tuple[list[int], list[float]]:
        """(steps, losses) of a split."""
        points = [point for point in self.points if point.split == split]
        return [point.step for point in points], [point.loss for point in points]

    @property
    def first_step_seconds(self) -> float:
        """The first step compiles."""
        return self.points[0].seconds

    @property
    def step_seconds(self) -> float:
        """Median over the steps that neither compile nor warm up."""
        timed = [p.seconds for p in self.points if p.split == "train" and p.step > UNTIMED_STEPS]
        return statistics.median(timed) if timed else math.nan


# ------------------------------------------------------------------------------------------- data


def read_documents(path: Path | None) -> list[str]:
    """The text of a file, or of every UTF-8 file in a folder, in a fixed order.

    Without a path, the sources of the standard library of the Python that runs this.
    """
    if path is not None and path.is_file():
        return [path.read_text(encoding="utf-8")]
    if path is not None and not path.is_dir():
        raise ValueError(f"--data {path}: no such file or folder")
    root, pattern, skipped = path, "*", set[str]()
    if root is None:
        root, pattern = Path(sysconfig.get_paths()["stdlib"]), "*.py"
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    documents = []
    for file in sorted(root.rglob(pattern)):
        if not file.is_file() or skipped & set(file.relative_to(root).parts):
            continue
        try:
            documents.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # not text
    if not documents:
        raise ValueError(f"--data {root}: no UTF-8 text found in this folder")
    return documents


def split_text(documents: list[str], seed: int) -> tuple[str, str]:
    """(training text, validation text): the documents in a random order, cut once."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    text = "\n".join(shuffled)
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]


def pieces(text: str) -> list[str]:
    return [text[i : i + ENCODE_CHARS] for i in range(0, len(text), ENCODE_CHARS)]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries; 256 of them are the bytes, the rest are merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(text), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """int64 [tokens]."""
    encodings = tokenizer.encode_batch(pieces(text))
    return torch.cat([torch.tensor(encoding.ids) for encoding in encodings])


def draw_batches(tokens: torch.Tensor, count: int, batch: int, seq: int, seed: int) -> torch.Tensor:
    """int64 [count, batch, seq]: windows of `tokens` at random places.

    Drawn once and handed to every run, so that the order of the data cannot differ.
    """
    if len(tokens) < seq:
        raise ValueError(
            f"the text has {len(tokens)} tokens, less than --seq {seq}: give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - seq + 1, (count, batch, 1), generator=generator)
    return tokens[starts + torch.arange(seq)]


# --------------------------------------------------------------------------------------- training


def build_model(size: ModelSize, vocab_size: int, seq: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero. `step` counts from 0."""
    warmup = max(1, int(steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def compile_options(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """What `torch.compile(..., options=)` is given for this recipe.

    As in the paper the output layer stays in bf16, unless --config has a policy of its own.
    """
    options: dict[str, Any] = {"recipe": recipe}
    if args.config is None:
        options["policy"] = {"*lm_head*": "bf16"}
    if recipe != "bf16":
        options["dump"] = str(dump_folder(args, recipe))
    return {**options, **args.compile_options}


def dump_folder(args: argparse.Namespace, recipe: str) -> Path:
    return args.out / "graphs" / recipe


def train(
    args: argparse.Namespace,
    team: several_gpus.Team,
    recipe: str,
    train_set: torch.Tensor,
    val_set: torch.Tensor,
    vocab_size: int,
    write: Callable[[Point], None],
) -> Run:
    """Train one model from scratch with `recipe`; every loss is also handed to `write` at once.

    train_set is int64 [steps, batch, seq], val_set int64 [batches, batch, seq].
    """
    torch._dynamo.reset()
    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    model = build_model(size, vocab_size, args.seq).to(args.device)
    compiled = team.compile(model, backend="quartet2", options=compile_options(args, recipe))
    if args.coins is not None:
        torch.manual_seed(args.coins)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr or size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps)
    )

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        tokens = team.share(tokens).to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            return compiled(input_ids=tokens, labels=tokens).loss

    def training_step(tokens: torch.Tensor) -> float:
        loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return team.mean(loss).item()  # waits for the device

    def validation_loss() -> float:
        # Gradients stay enabled: the graph that trains also evaluates, and nothing compiles twice.
        return statistics.fmean(team.mean(loss_of(tokens)).item() for tokens in val_set)

    run = Run(recipe)

    def measure(step: int, split: str, compute: Callable[[], float]) -> float:
        lr, start = float(schedule.get_last_lr()[0]), time.perf_counter()
        loss = compute()
        point = Point(recipe, step, split, loss, lr, time.perf_counter() - start)
        run.points.append(point)
        write(point)
        return loss

    shown = {"train": "-", "val": "-"}
    with progress_bar(args.steps, f"{recipe}, compiling", hidden=not team.leads) as bar:
        for step, tokens in enumerate(train_set, start=1):
            loss = measure(step, "train", partial(training_step, tokens))
            shown["train"] = f"{loss:.3f}"
            schedule.step()
            if step % args.eval_every == 0 or step == args.steps:
                shown["val"] = f"{measure(step, 'val', validation_loss):.3f}"
            bar.set_description(recipe, refresh=False)
            bar.set_postfix(shown, refresh=False)
            bar.update()
    return run


def progress_bar(steps: int, description: str, hidden: bool) -> tqdm:
    """On a terminal a live bar; in a log file a line every few seconds."""
    interval = 0.2 if sys.stderr.isatty() else 15.0
    return tqdm(total=steps, desc=description, unit="step", mininterval=interval, disable=hidden)


# ---------------------------------------------------------------------------------------- results


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    """Training losses, smoothed and faint as they are, and the validation losses as dots."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        color = f"C{index}"
        steps, losses = run.losses("train")
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=color, label=f"{run.recipe}, train (smoothed)")
        axes.plot(*run.losses("val"), "o--", color=color, label=f"{run.recipe}, validation")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def summary(runs: Sequence[Run]) -> str:
    """A table, one line per recipe; gaps and ratios are to the first one."""
    first = runs[0]
    lines = [
        f"{'recipe':<12}{'val loss':>10}{'gap':>10}{'s/step':>10}{'ratio':>8}{'first step, s':>15}"
    ]
    for run in runs:
        val = run.losses("val")[1][-1]
        lines.append(
            f"{run.recipe:<12}{val:>10.4f}{val - first.losses('val')[1][-1]:>+10.4f}"
            f"{run.step_seconds:>10.3f}{run.step_seconds / first.step_seconds:>8.2f}"
            f"{run.first_step_seconds:>15.1f}"
        )
    lines.append(f"(gap and ratio: to {first.recipe}; the first step compiles)")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- main


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
        description="Train the same Llama on the same text once per recipe, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--recipes", default="bf16,quartet2", help="comma-separated; the first is the baseline")
    add("--data", type=Path, help="text file, or folder of text files; by default Python's sources")
    add("--out", type=Path, default=Path("runs/train_llama"), help="folder for everything written")
    add("--size", choices=SIZES, default="demo", help="shape of the model")
    add("--steps", type=positive, default=120)
    add("--batch", type=positive, default=4, help="sequences per step")
    add("--seq", type=positive, default=256, help="tokens per sequence")
    add("--vocab", type=positive, default=1024, help="entries of the BPE; 256 means plain bytes")
    add("--lr", type=float, help="peak learning rate; by default the size's")
    add("--seed", type=int, default=0, help="of the weights, the data order and the rounding")
    add("--coins", type=int, help="seed of the rounding, where it is to be another")
    add("--eval-every", type=positive, default=30, help="steps between two validations")
    add("--eval-batches", type=positive, default=8, help="batches of one validation")
    add("--device", default="auto", help="auto takes CUDA when there is one")
    add("--config", type=Path, help="TOML or JSON file of compile options, as Q2COMPILE_CONFIG")
    add(
        "--compile-options",
        type=json_object,
        default={},
        metavar="JSON",
        help="compile options on top of the file's and of this example's own",
    )
    several_gpus.add_arguments(parser)
    args = parser.parse_args(argv)
    args.recipes = [name.strip() for name in args.recipes.split(",") if name.strip()]
    if not args.recipes:
        parser.error("--recipes: name at least one")
    if args.vocab < 256:
        parser.error(f"--vocab {args.vocab}: at least 256, one entry per byte")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def check_options(args: argparse.Namespace) -> None:
    """Refuse a wrong recipe or option now rather than after the runs before it."""
    if args.config is not None:
        os.environ["Q2COMPILE_CONFIG"] = str(args.config)
    for recipe in args.recipes:
        q2compile.Config.from_options(compile_options(args, recipe))


def load_data(
    args: argparse.Namespace, say: Callable[[str], None] = print
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(training batches, validation batches, vocabulary size); the same for every recipe."""
    source = args.data or "Python's standard library"
    say(f"reading {source}, training a tokenizer of {args.vocab} entries")
    train_text, val_text = split_text(read_documents(args.data), args.seed)
    tokenizer = train_tokenizer(train_text, args.vocab)
    train_tokens, val_tokens = encode(tokenizer, train_text), encode(tokenizer, val_text)
    say(
        f"{len(train_tokens):,} tokens to train on, {len(val_tokens):,} held out; "
        f"{args.steps} steps of {args.batch} x {args.seq} tokens on {args.device}"
    )
    train_set = draw_batches(train_tokens, args.steps, args.batch, args.seq, args.seed)
    val_set = draw_batches(val_tokens, args.eval_batches, args.batch, args.seq, args.seed)
    return train_set, val_set, tokenizer.get_vocab_size()


def print_where_to_look(args: argparse.Namespace, team: several_gpus.Team) -> None:
    print(f"losses: {args.out / 'losses.csv'}")
    print(f"loss curves: {args.out / 'losses.png'}")
    for recipe in args.recipes:
        folder = dump_folder(args, recipe)
        if team.size > 1:
            folder /= f"rank{team.rank}"
        if (folder / "report.json").exists():
            subprocess.run(
                [sys.executable, "-m", "q2compile.cli", "report", str(folder)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            print(f"{recipe} report: {folder / 'report.html'} (as text: report.txt)")
            print(f"{recipe} graphs: {folder}, a folder per graph, a file per stage")


@contextmanager
def losses_file(args: argparse.Namespace) -> Iterator[Callable[[Point], None]]:
    """A function that writes a row of losses.csv."""
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "losses.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in fields(Point)])

        def write(point: Point) -> None:
            writer.writerow(astuple(point))
            file.flush()  # a long run can be watched, and keeps what it had when it is stopped

        yield write


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        check_options(args)
        team = several_gpus.Team(args)
        train_set, val_set, vocab_size = load_data(args, team.say)
    except ValueError as error:
        print(f"train_llama.py: {error}", file=sys.stderr)
        return 2
    runs = []
    with losses_file(args) if team.leads else nullcontext(lambda point: None) as write:
        for recipe in args.recipes:
            runs.append(train(args, team, recipe, train_set, val_set, vocab_size, write))
            if team.leads:
                plot(runs, f"Llama {args.size}, {args.steps} steps", args.out / "losses.png")
    if team.leads:
        print(summary(runs))
        print_where_to_look(args, team)
    team.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
