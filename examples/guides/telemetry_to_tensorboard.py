# SPDX-License-Identifier: Apache-2.0
"""Record the quantization error of every operand while a model trains, and show it as curves.

    pip install tensorboard
    python examples/guides/telemetry_to_tensorboard.py --to runs/telemetry
    tensorboard --logdir runs/telemetry

Without TensorBoard, the same records are in rank0.jsonl and rank0.csv of the folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import q2compile


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", default="runs/telemetry", help="folder; default %(default)s")
    parser.add_argument("--every", type=int, default=10, help="steps between records; default 10")
    parser.add_argument("--modules", default="*", help="a pattern of module names; default: all")
    parser.add_argument("--recipe", default="quartet2", help="default %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="default %(default)s")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Model()
    telemetry = {"every": args.every, "modules": args.modules, "to": args.to, "csv": True}
    model.compile(backend="quartet2", options={"recipe": args.recipe, "telemetry": telemetry})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(512, 64)
    for _ in range(args.steps):
        loss = F.mse_loss(model(x), x.flip(1).abs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    q2compile.telemetry.flush()  # to read the records now; at exit this happens by itself

    lines = (Path(args.to) / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "event" not in (record := json.loads(line))]
    last = [record for record in records if record["step"] == records[-1]["step"]]
    print(f"{len(records)} records in {args.to}; the last ones, from step {last[0]['step']}:")
    for r in last:
        operand = f"{r['module']} {r['gemm']} {r['operand']}"
        print(f"{operand:12} relative error {r['relative_error']:.4f}, amax {r['amax']:.3g}")
    if importlib.util.find_spec("tensorboard"):
        print(f"to see curves: tensorboard --logdir {args.to}")
    else:
        print("to see curves: pip install tensorboard, and run this again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
