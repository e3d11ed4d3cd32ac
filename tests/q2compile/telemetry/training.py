# SPDX-License-Identifier: Apache-2.0
"""A small training loop with telemetry, and its records."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from q2compile.telemetry.folder import flush
from tests.support.new_process import restart_clock

WIDTH, INNER, ROWS = 64, 128, 48


class Block(nn.Module):
    """x + down(silu(gate(h)) · up(h)), h = norm(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# Arguments: the folder, and what ends a step.
PROGRAM = """
import sys
import torch
from tests.q2compile.telemetry.training import batch, compiled, new_model
from pathlib import Path

model = new_model(blocks=1)
call = compiled(model, Path(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
for step in range(3):
    if sys.argv[2] == "inference":
        with torch.no_grad():
            call(batch(0, model))
        continue
    call(batch(0, model)).sum().backward()
    if sys.argv[2] == "raw writes":
        for p in model.parameters():
            p.data.sub_(p.grad, alpha=1e-3)
    else:
        optimizer.step()
"""

LINEARS = ("gate", "up", "down")


def new_model(blocks: int = 2, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model(blocks).to(dtype)


def batch(step: int, like: nn.Module) -> Tensor:
    weight = next(like.parameters())
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).to(weight)


def train(
    model, call, steps=3, micro_batches=1, before=None, lr=0.05, inputs_need_gradients=False
) -> list[Tensor]:
    """Losses and gradients of all steps; the optimizer's step ends each. before(step): called
    first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen: list[Tensor] = []
    torch.manual_seed(1)
    for step in range(steps):
        if before is not None:
            before(step)
        for part in range(micro_batches):
            x = batch(step * micro_batches + part, model).requires_grad_(inputs_need_gradients)
            loss = call(x).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def compiled(model: nn.Module, folder: Path | None, **options):
    """torch.compile, without Inductor by default; ``every`` goes to telemetry."""
    telemetry = {key: options.pop(key) for key in ("every", "modules", "csv") if key in options}
    options = {"inner": "eager", **options}
    if folder is not None:
        options["telemetry"] = {"every": 1, **telemetry, "to": str(folder)}
    return torch.compile(model, backend="quartet2", options=options)


def records(folder: Path, rank: int = 0) -> list[dict]:
    """All lines that are records."""
    return [line for line in lines(folder, rank) if "event" not in line]


def events(folder: Path, rank: int = 0) -> list[dict]:
    return [line for line in lines(folder, rank) if line.get("event") == "nonfinite"]


def lines(folder: Path, rank: int = 0) -> list[dict]:
    flush()
    path = folder / f"rank{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def operands(found: list[dict], step: int) -> set[tuple[str, str, str]]:
    return {(r["module"], r["gemm"], r["operand"]) for r in found if r["step"] == step}


def all_operands(modules) -> set[tuple[str, str, str]]:
    gemms = {"fprop": "x w", "dgrad": "dy w", "wgrad": "dy x"}
    return {(m, gemm, role) for m in modules for gemm, two in gemms.items() for role in two.split()}


def names(blocks: int = 2) -> list[str]:
    return [f"layers.{i}.{name}" for i in range(blocks) for name in LINEARS]


def forget_all() -> None:
    """The state of a new process: step 0, no folder in use."""
    from q2compile.telemetry import folder

    folder.forget_folders()
    restart_clock()
