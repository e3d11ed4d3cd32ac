# SPDX-License-Identifier: Apache-2.0
"""Train with a policy that keeps the first layer, the head, and one GEMM of others in BF16.

    python examples/guides/policy_per_module.py
    python examples/guides/policy_per_module.py --policy '{"*": "bf16", "layers.1.*": "nvfp4"}'

The second command quantizes only layer 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import q2compile

POLICY = {  # names of modules; the last pattern that matches decides
    "layers.0.*": "bf16",
    "*.down": {"dgrad": "bf16"},
    "head": "bf16",
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64, classes: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(3)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", type=json.loads, default=POLICY, help="a JSON mapping")
    text = "recipe of all other layers; default %(default)s"
    parser.add_argument("--recipe", default="quartet2", help=text)
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    args = parser.parse_args(argv)

    # With strict, a pattern that matches nothing raises an error.
    options = {"recipe": args.recipe, "policy": args.policy, "strict": True}
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 64)
    target = x[:, :32].argmax(1)
    for row in q2compile.explain(model, x, options=options).to_json():
        print(f"{row['module']:14} {row['recipe'] if row['taken'] else row['why']}")

    model.compile(backend="quartet2", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
