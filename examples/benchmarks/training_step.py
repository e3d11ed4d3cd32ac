"""The step that the benchmarks of whole models time, and the first of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config

Step = Callable[[], object]


def training_step(model: torch.nn.Module, tokens: torch.Tensor, **compile_with: Any) -> Step:
    """Forward and backward of a causal language model of transformers under bf16 autocast, without
    an optimizer; `compile_with` is torch.compile's. Dynamo keeps what it compiled of this model
    with others, and takes it again where they are equal."""
    compiled: Any = torch.compile(model, **compile_with)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()

    return step


def first_seconds(step: Step) -> float:
    """Of a step that compiles, with Inductor's caches empty."""
    start = time.perf_counter()
    with inductor_config.patch(force_disable_caches=True):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start
