"""Hugging Face's Trainer: compile the model before the Trainer gets it, and change nothing else.

TrainingArguments(torch_compile_backend=...) takes only the names that accelerate lists, so it stays
unset. Saved checkpoints are those of the plain model.

    python examples/trainers/hf_trainer.py --out runs/hf_trainer
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Counting(Dataset):
    """Rows of numbers that count up, by one, from a random start: easy to learn."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(vocabulary, (rows, 1), generator=generator)
        self.tokens = (start + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def train(out: str, steps: int, options: dict[str, object]) -> tuple[LlamaForCausalLM, float]:
    """Train a tiny Llama; return it and the mean loss that the Trainer reports."""
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
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(256, 16, config.vocab_size))
    loss = trainer.train().training_loss
    trainer.save_model(out)
    return model, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="runs/hf_trainer", help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    _, loss = train(arguments.out, arguments.steps, {"policy": {"lm_head": "bf16"}})
    print(f"mean loss over {arguments.steps} steps: {loss:.3f}")


if __name__ == "__main__":
    main()
