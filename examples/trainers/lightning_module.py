# SPDX-License-Identifier: Apache-2.0
"""Lightning: compile the network inside the LightningModule, where the network is created.

The checkpoint has the names of the plain network, because Module.compile wraps nothing.

    python examples/trainers/lightning_module.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import q2compile


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Classifier(lightning.LightningModule):
    """A network that learns the signs of 16 projections of x.

    options: options of q2compile
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.network = Network()
        self.network.compile(backend="quartet2", options=options)  # all that q2compile needs
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self.network(x), y)
        self.losses.append(loss.item())
        return loss

    # With the counter of the option seed in the checkpoint, a resumed run has the same bits.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["q2compile"] = q2compile.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        q2compile.set_rng_state(checkpoint["q2compile"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(
    steps: int, options: dict[str, Any], accelerator: str = "auto", checkpoint: str = ""
) -> Classifier:
    """Train for ``steps`` steps, and return the module, which has the losses.

    checkpoint: a file to write
    """
    torch.manual_seed(0)
    x = torch.randn(32 * steps, 64)
    y = (x @ torch.randn(64, 16) > 0).float()
    module = Classifier(options)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator=accelerator,
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=32))
    if checkpoint:
        trainer.save_checkpoint(checkpoint)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    module = train(parser.parse_args().steps, {"recipe": "quartet2", "seed": 0})
    print(f"loss: first {module.losses[0]:.3f}, last {module.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
