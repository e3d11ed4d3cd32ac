"""What q2compile takes of the host: a call in generated code, and a linear of a training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from q2compile import lowering
from q2compile.tools.bench.timing import Call

_SIZE = 128


def per_call(device: torch.device, few: int = 8, many: int = 40, repeats: int = 200) -> float:
    """Microseconds of a call of an op of two launches in a compiled graph, its buffers included:
    the slope over how many calls there are. (On a CPU, where the op is the reference, that.)"""
    x = torch.randn(_SIZE, _SIZE, device=device).bfloat16()
    seeds = torch.arange(many, device=device)

    def calls(count: int) -> Call:
        def function(x: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for i in range(count):
                args = (x, seeds[i], "nvfp4_ms_eden_pow2", "rht128", False, 0)
                results += torch.ops.q2.rht_quantize(*args)
            return results

        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return lambda: compiled(x, seeds)

    lowering.register()
    of_few, of_many = (_seconds(calls(count), device, repeats) for count in (few, many))
    return 1e6 * (of_many - of_few) / (many - few)


def per_linear(
    device: torch.device, backend: str, few: int = 8, many: int = 24, repeats: int = 200
) -> float:
    """Microseconds of one linear more in a forward and backward of small ones, with what autograd
    keeps of it: the slope over how many there are."""
    times = []
    for count in (few, many):
        torch._dynamo.reset()
        parts = [part for _ in range(count) for part in (nn.Linear(_SIZE, _SIZE), nn.SiLU())]
        model = nn.Sequential(*parts).to(device, torch.bfloat16)
        compiled = torch.compile(model, backend=backend)
        x = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)

        def step(compiled: Any = compiled, model: nn.Module = model, x=x, dy=dy) -> None:
            model.zero_grad(set_to_none=True)
            compiled(x).backward(dy)

        times.append(_seconds(step, device, repeats))
    return 1e6 * (times[1] - times[0]) / (many - few)


def _seconds(call: Call, device: torch.device, repeats: int) -> float:
    """Of the host for a call, with the device never in its way. Median."""
    call()  # compiles
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
