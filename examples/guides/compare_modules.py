# SPDX-License-Identifier: Apache-2.0
"""Find the modules that a recipe's error comes from, and keep the worst ones in FP8 or BF16.

    python examples/guides/compare_modules.py --recipe nvfp4 --budget 0.2

For your own model, `q2compile compare my_setup.py:build` does the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import q2compile


def build() -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model and a few batches. Replace them with yours, from the checkpoint to examine."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)
    )
    return model, [torch.randn(256, 64) for _ in range(3)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Compute the loss of the model's output. If the output has a ``loss``, leave this out."""
    return F.cross_entropy(output, output.detach().argmax(1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="quartet2", help="default %(default)s")
    text = "share of the FLOPs that may go back to FP8 or BF16; default %(default)s"
    parser.add_argument("--budget", type=float, default=0.2, help=text)
    parser.add_argument("--picture", help="draw the ranking (png, svg, pdf); needs matplotlib")
    args = parser.parse_args(argv)

    model, batches = build()
    comparison = q2compile.compare(
        model,
        batches,
        args.recipe,
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    print(comparison)
    options = comparison.options(args.budget)
    print(f"\noptions that put the worst modules, up to {args.budget:.0%} of the FLOPs, back:")
    print(json.dumps(options, indent=2))
    if args.picture:
        comparison.draw(args.picture)

    compiled = torch.compile(model, backend="quartet2", options=options)  # and continue training
    print(f"loss with that policy: {loss_of(compiled(batches[0])).item():.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
