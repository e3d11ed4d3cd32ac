# SPDX-License-Identifier: Apache-2.0
"""Late switch: run the forward in BF16 for the last part of training, and the backward in FP4.

    python examples/guides/late_switch.py --recipe nvfp4 --switch-at 0.82

Compiling again changes the recipe. Parameters and optimizer states stay as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="nvfp4", help="default %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="default %(default)s")
    text = "switch after this share of the steps, never if it is 1; default %(default)s"
    parser.add_argument("--switch-at", type=float, default=0.82, help=text)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    x = torch.randn(512, 64)
    target = x.flip(1).abs()

    model.compile(backend="quartet2", options={"recipe": args.recipe})
    for step in range(args.steps):
        if step == int(args.switch_at * args.steps):
            late = {"base": args.recipe, "fprop": "bf16"}
            model.compile(backend="quartet2", options={"recipe": late})
            print(f"step {step + 1}: the forward runs in BF16 from here on")
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
