# SPDX-License-Identifier: Apache-2.0
"""Shared by the workers and their test: a small model, its training, and the recorded results.

Workers run under torchrun and write one file per scenario and rank into the folder named by their
argument. `test_distributed.py` starts them and reads the files. In one process the same functions
give the results for comparison.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from q2compile.report.report import RunReport, collector

VOCAB, HIDDEN, INNER, LAYERS = 96, 64, 128, 2
UNEVEN = 131  # an inner width that two ranks can't share equally
BATCH, SEQ, STEPS = 4, 32, 3


class Block(nn.Module):
    """x + down(silu(gate(h)) · up(h)), h = norm(x); up and down have biases."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, inner, bias=False)
        self.up = nn.Linear(HIDDEN, inner)
        self.down = nn.Linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """int64 [B, S] -> logits [B, S, VOCAB]."""

    def __init__(self, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(inner) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def new_model(inner: int = INNER, layers: int = LAYERS) -> Model:
    """The same weights in every process; biases that count."""
    torch.manual_seed(0)
    model = Model(inner, layers)
    for layer in model.layers:
        nn.init.normal_(layer.up.bias)
        nn.init.normal_(layer.down.bias)
    return model


def batches() -> Tensor:
    """int64 [STEPS, BATCH, SEQ], the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (STEPS, BATCH, SEQ), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Result:
    """The results of one rank in one scenario."""

    losses: list[float] = field(default_factory=list)  # of each step, the mean over the ranks' data
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, whole
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step, this rank's
    collectives: dict[tuple[int, ...], int] = field(default_factory=dict)  # of the last step
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the report
    notes: list[str] = field(default_factory=list)
    drifted: dict[str, Tensor] = field(default_factory=dict)  # parameters, with other generators
    error: str = ""


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def train(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    *,
    parts: int = 1,
    part: int = 0,
    rounding_seed: int = 0,
    autocast: bool = False,
) -> Result:
    """STEPS steps of AdamW on ``model``'s parameters; ``call`` gives the logits.

    parts, part: the batch is cut into equal parts, and this rank has that one.
    rounding_seed: seed of the rounding.
    """
    result, report = Result(), RunReport()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    token = collector.set(report)
    torch.manual_seed(rounding_seed)
    try:
        for step, tokens in enumerate(batches()):
            mine = tokens.chunk(parts)[part]
            before = collectives_so_far()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = call(mine)
            loss = loss_of(logits, mine)
            loss.backward()
            after = collectives_so_far()
            result.losses.append(mean_over_ranks(loss, parts))
            if step == 0:
                result.gradients = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        collector.reset(token)
    result.collectives = dict(after - before)
    result.parameters = {
        n: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }
    result.rows, result.notes = report.to_json(), report.notes
    return result


def collectives_so_far() -> Counter[tuple[int, ...]]:
    """Ranks -> how many collectives were started among them."""
    counts: Counter[tuple[int, ...]] = Counter()
    if dist.is_initialized():
        for group in distributed_c10d._world.pg_names:
            ranks = tuple(dist.get_process_group_ranks(group))
            counts[ranks] += group._get_sequence_number_for_group()
    return counts


def mean_over_ranks(loss: Tensor, parts: int) -> float:
    if parts == 1:
        return loss.item()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the plain model's names."""
    plain = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        parts = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
        plain[parts.removeprefix("_orig_mod.")] = whole(parameter.grad)
    return plain


def run_scenarios(scenarios_on: Callable[[int], dict[str, Callable[[], Result]]]) -> None:
    """Run those for this number of ranks, as one of a gloo group, and save each one's Result, or
    its traceback."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        for name, scenario in scenarios_on(dist.get_world_size()).items():
            torch._dynamo.reset()
            try:
                result = scenario()
            except Exception:
                result = Result(error=traceback.format_exc())
            torch.save(result, folder / f"{name}.rank{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()
