# SPDX-License-Identifier: Apache-2.0
"""Host time of q2compile: of a call in generated code, and of a linear in a training step.

Both are slopes over the number of calls, measured interleaved. On a busy machine a slope may be
lost in the noise and not be positive; reports then say so."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from q2compile import lowering
from q2compile.tools.bench.timing import Call

_SIZE = 128


def per_call(device: torch.device, few: int = 8, many: int = 40, repeats: int = 200) -> float:
    """Microseconds of a call of an op of two launches in a compiled graph, its buffers included:
    the slope over how many calls there are. (On a CPU the op is the reference, which is timed.)"""
    x = torch.randn(_SIZE, _SIZE, device=device).bfloat16()
    seeds = torch.arange(many, device=device)

    def calls(count: int) -> Call:
        def function(x: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for i in range(count):
                results += torch.ops.q2.quantize(
                    x,
                    scheme="nvfp4_ms_eden_pow2",
                    transform="rht128",
                    rowwise=True,
                    columnwise=False,
                    rowwise_seed=seeds[i],
                )
            return results

        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return lambda: compiled(x, seeds)

    lowering.register()
    return _longer_by([calls(few), calls(many)], device, repeats) / (many - few)


def per_linear(
    device: torch.device, backend: str, few: int = 8, many: int = 24, repeats: int = 200
) -> float:
    """Microseconds of one linear more in a forward and backward of small ones, with what autograd
    keeps of it: the slope over how many there are."""
    torch._dynamo.reset()
    steps: list[Call] = []
    for count in (few, many):
        parts = [part for _ in range(count) for part in (nn.Linear(_SIZE, _SIZE), nn.SiLU())]
        model = nn.Sequential(*parts).to(device, torch.bfloat16)
        compiled = torch.compile(model, backend=backend)
        x = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)

        def step(compiled: Any = compiled, model: nn.Module = model, x=x, dy=dy) -> None:
            model.zero_grad(set_to_none=True)
            compiled(x).backward(dy)

        steps.append(step)
    return _longer_by(steps, device, repeats) / (many - few)


def _longer_by(calls: Sequence[Call], device: torch.device, repeats: int) -> float:
    """Microseconds of the host that the second of two calls takes longer than the first, with the
    device never in its way. Median over turns: what slows the machine down for longer than a turn
    slows down both."""
    for call in calls:
        call()  # compiles
    differences = []
    for _ in range(repeats):
        times = []
        for call in calls:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        differences.append(times[1] - times[0])
    return 1e6 * statistics.median(differences)
