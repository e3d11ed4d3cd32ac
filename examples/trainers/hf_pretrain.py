# SPDX-License-Identifier: Apache-2.0
"""Pretrain a Llama of `examples/pretrain.py` with Hugging Face's Trainer, on one of its corpora.

    python examples/trainers/hf_pretrain.py --corpus corpus/ --recipe quartet2 --size 100m

It prints the held-out loss, the tokens per second after the first steps, and the peak of device
memory. To use several GPUs, start it with torchrun. Without torchrun, the Trainer would run
DataParallel on all GPUs that it sees, so show it only one (CUDA_VISIBLE_DEVICES=0).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretraining.batches import Windows
from pretraining.corpus import Corpus
from pretraining.model import SIZES, build_model

UNTIMED = 10  # steps at the beginning; the first one compiles


class Rows(Dataset):
    """Windows in the form that the Trainer expects: one sequence of [S] tokens per row."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows  # each is a batch of one sequence

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = self.windows[i][0]
        return {"input_ids": row, "labels": row}


class Clock(TrainerCallback):
    """Measures the time from the end of step UNTIMED to the end of the last step."""

    def __init__(self) -> None:
        self.marks: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step in (UNTIMED, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks[state.global_step] = time.perf_counter()

    @property
    def seconds_per_step(self) -> float:
        steps = max(self.marks) - min(self.marks)
        return (max(self.marks.values()) - min(self.marks.values())) / steps if steps else 0.0


def train(args: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """Train with the unmodified Trainer, and return the results. others: options of q2compile."""
    corpus, size = Corpus.open(args.corpus), SIZES[args.size]
    torch.manual_seed(args.seed)
    model = build_model(size, corpus.facts.vocab, args.seq)
    options = {"recipe": args.recipe, "policy": {"*lm_head*": "bf16"}, **others}
    if args.dump:
        options["dump"] = args.dump
    model.compile(backend="quartet2", options=options)  # the one line that q2compile needs
    arguments = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        learning_rate=size.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=True,
        logging_steps=max(1, args.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=args.workers,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
    )
    clock = Clock()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rows(Windows(corpus.train, args.steps * args.batch, 1, args.seq, args.seed)),
        eval_dataset=Rows(Windows(corpus.val, args.eval_batches * args.batch, 1, args.seq, None)),
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    seconds = clock.seconds_per_step
    return {
        "recipe": args.recipe,
        "size": args.size,
        "steps": args.steps,
        "tokens": args.steps * args.batch * args.seq,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "tokens_per_second": round(args.batch * args.seq / seconds) if seconds else None,
        "peak_gib": round(peak / 2**30, 3),
        "corpus": corpus.facts.hash,
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="the folder that `pretrain.py corpus` wrote")
    add("--recipe", default="quartet2", help="a recipe of q2compile; bf16 is the baseline")
    add("--size", choices=SIZES, default="100m", help="model size")
    add("--steps", type=int, default=300, help="steps to train")
    add("--batch", type=int, default=32, help="sequences per step")
    add("--seq", type=int, default=512, help="tokens per sequence")
    add("--eval-batches", type=int, default=32, help="batches for the held-out loss")
    add("--workers", type=int, default=0, help="processes that read batches")
    add("--seed", type=int, default=0, help="seed of the weights and the data order")
    add("--dump", help="folder for graphs and the report")
    add("--out", default="runs/hf_pretrain", help="output folder of the Trainer")
    return parser.parse_args(argv)


def main() -> None:
    print(json.dumps(train(parse_args())), flush=True)


if __name__ == "__main__":
    main()
