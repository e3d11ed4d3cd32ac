# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages, each a compiled module, on 2 ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from training import LAYERS, Model, Result, batches, gradients, loss_of, new_model, run_scenarios

from q2compile.report.report import RunReport, collector

MICRO_BATCHES = 2


class Stage(nn.Module):
    """The part of a `Model` that one rank runs, under the names that the model gives it."""

    def __init__(self, model: Model, stage: int) -> None:
        super().__init__()
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(stage): model.layers[stage]})
        last = stage == LAYERS - 1
        self.norm = model.norm if last else nn.Identity()
        self.head = model.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def one_stage_a_rank() -> Result:
    rank, result, report = dist.get_rank(), Result(), RunReport()
    module = Stage(new_model(), rank)
    options = {"inner": "eager", "policy": {"head": "bf16"}}
    module.compile(backend="quartet2", options=options)
    stage = PipelineStage(module, rank, LAYERS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, foreach=False)
    token = collector.set(report)
    torch.manual_seed(0)
    try:
        for step, tokens in enumerate(batches()):
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens, losses=losses)
                result.losses.append(torch.stack(losses).mean().item())
            if step == 0:
                result.gradients = gradients(module)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        collector.reset(token)
    result.rows, result.notes = report.to_json(), report.notes
    return result


if __name__ == "__main__":
    run_scenarios(lambda ranks: {"pipeline": one_stage_a_rank})
