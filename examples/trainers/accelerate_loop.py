# SPDX-License-Identifier: Apache-2.0
"""Your own training loop with accelerate: compile the model, then let accelerate prepare it.

Accelerator(dynamo_backend=...) accepts only the names that accelerate lists, so leave it unset.

    python examples/trainers/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import q2compile


class Classifier(nn.Module):
    """A network of two layers, which learns the signs of 16 projections of x."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class RandomBits:
    """The counter of the option seed; accelerate saves and loads it with a checkpoint."""

    def state_dict(self) -> dict[str, dict[int, int]]:
        return q2compile.get_rng_state()

    def load_state_dict(self, state: dict[str, dict[int, int]]) -> None:
        q2compile.set_rng_state(state)


def train(
    steps: int, options: dict[str, object], cpu: bool = False, checkpoint: str = ""
) -> tuple[nn.Module, list[float]]:
    """Train for ``steps`` optimizer steps of two micro-batches each, and return model and losses.

    checkpoint: a folder to write
    """
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=cpu)
    torch.manual_seed(0)
    x = torch.randn(64 * steps, 64)
    y = (x @ torch.randn(64, 16) > 0).float()
    model = Classifier()
    model.compile(backend="quartet2", options=options)  # the one line that q2compile needs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(RandomBits())
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.binary_cross_entropy_with_logits(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if checkpoint:
        accelerator.save_state(checkpoint)
    return accelerator.unwrap_model(model), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    _, losses = train(parser.parse_args().steps, {"recipe": "quartet2", "seed": 0})
    print(f"loss: first {losses[0]:.3f}, last {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
