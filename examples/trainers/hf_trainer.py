# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: compile the model before the Trainer gets it, and change nothing else.

TrainingArguments(torch_compile_backend=...) accepts only the names that accelerate lists, so leave
it unset. Checkpoints have the names of the plain model.

    python examples/trainers/hf_trainer.py --out runs/hf_trainer
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import q2compile

SAVE_STEPS = 10


class Counting(Dataset):
    """Rows of numbers that count up from a random start, which is easy to learn."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(vocabulary, (rows, 1), generator=generator)
        self.tokens = (start + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


class KeepRandomBits(TrainerCallback):
    """Saves the counter of the option seed in each checkpoint, and restores it on resuming."""

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.file(args, state).write_text(json.dumps(q2compile.get_rng_state()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step:  # resumed
            q2compile.set_rng_state(json.loads(self.file(args, state).read_text()))

    def file(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "q2compile_rng.json"


def train(
    out: str, steps: int, options: dict[str, object], resume: bool = False
) -> tuple[LlamaForCausalLM, float]:
    """Train a tiny Llama. Return it and the mean loss that the Trainer reports.

    resume: continue from the last checkpoint in ``out``
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.compile(backend="quartet2", options=options)  # the one line that q2compile needs
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        bf16=True,
        gradient_checkpointing=False,
        save_steps=SAVE_STEPS,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Counting(256, 16, config.vocab_size),
        callbacks=[KeepRandomBits()],
    )
    loss = trainer.train(resume_from_checkpoint=resume).training_loss
    trainer.save_model(out)
    return model, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="runs/hf_trainer", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    arguments = parser.parse_args()
    _, loss = train(arguments.out, arguments.steps, {"policy": {"lm_head": "bf16"}, "seed": 0})
    print(f"mean loss over {arguments.steps} steps: {loss:.3f}")


if __name__ == "__main__":
    main()
