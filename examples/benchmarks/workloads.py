# SPDX-License-Identifier: Apache-2.0
"""Models, layers and shapes that the benchmarks time and that predicted.py predicts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.config as inductor_config
from rows import HERE
from torch import nn

sys.path.insert(0, str(HERE.parent))
from pretraining.model import SIZES, build_model

GPU = torch.device("cuda")
Step = Callable[[], object]
SHOWN = 30  # kernels of a row
INPUTS = 4  # alternating matrices of 64 MiB or more: more than the L2 cache holds

# One linear in bf16.
LINEAR_TOKENS = 16384
LINEARS = ((4096, 4096), (4096, 14336))

# Llamas of transformers.
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LLAMA_BATCH, LLAMA_SEQUENCE = 8, 2048
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_8B_TOKENS = 4096
MICRO_BATCHES = (1, 2, 4, 8)
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
# The 30M Llama of examples/pretraining.
LLAMA_30M, VOCABULARY_30M, SEQUENCE_30M = SIZES["30m"], 4096, 512

# Qwen3-MoE of transformers.
EXPERTS, EXPERTS_PER_TOKEN, MOE_WIDTH, EXPERT_WIDTH = 64, 8, 2048, 768
MOE: dict[str, Any] = {
    "hidden_size": MOE_WIDTH,
    "intermediate_size": EXPERT_WIDTH,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
MOE_BATCH, MOE_SEQUENCE = 4, 2048


def llama(
    config: dict[str, Any], dtype: torch.dtype | None = None, device: torch.device = GPU
) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**config, use_cache=False))
    return model if dtype is None else model.to(dtype)


def llama_30m() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build_model(LLAMA_30M, VOCABULARY_30M, SEQUENCE_30M)
    return model.to(GPU)


def mixture_of_experts() -> nn.Module:
    """bf16, its experts by torch's grouped GEMM."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model: nn.Module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, use_cache=False))
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    return model.to(GPU, torch.bfloat16)


class ExpertStack(nn.Module):
    """The gate and up projections of all experts, rows of x sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        shape = (EXPERTS, 2 * EXPERT_WIDTH, MOE_WIDTH)
        self.up = nn.Parameter(torch.randn(shape) / MOE_WIDTH**0.5)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.up.mT, offs=offs)


def random_tokens(vocabulary: int, batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, sequence), device=GPU)


def training_step(
    model: nn.Module,
    tokens: torch.Tensor,
    micro_batches: int = 1,
    autocast: bool = True,
    **compile_with: Any,
) -> Step:
    """Forward and backward of a causal language model of transformers under bf16 autocast, for each
    of some micro-batches, without an optimizer's step. `compile_with` are arguments of
    torch.compile. Dynamo keeps earlier compilations of the same model and uses them again for equal
    arguments."""
    compiled: Any = torch.compile(model, **compile_with)
    parameters = tuple(model.parameters())
    optimizer = torch.optim.SGD(parameters)  # codes of trained weights that have none are not kept

    def step() -> None:
        torch.autograd.graph.increment_version(parameters)  # as a step of the optimizer does
        optimizer.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()

    return step


def first_seconds(step: Step) -> float:
    """Seconds of a step that compiles, with Inductor's caches disabled."""
    start = time.perf_counter()
    with inductor_config.patch(force_disable_caches=True):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(step: Step) -> float:
    """Bytes allocated at the peak of a step, parameters and gradients included."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**30


def kernels_of(step: Step) -> list[Any]:
    """The profiler's events of one step on the GPU, those of a name together; longest first."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total]
    return sorted(events, key=lambda event: -event.self_device_time_total)


def launches_of(step: Step) -> tuple[int, float]:
    """Kernels of a step, and milliseconds of them together."""
    events = kernels_of(step)
    return sum(e.count for e in events), sum(e.self_device_time_total for e in events) / 1e3


def profiles_of(steps: Mapping[str, Step]) -> dict[str, Any]:
    """By backend: copies from the device to the host in a step, which routing must not cause, and
    the microseconds of its longest kernels."""
    copies, kernels = {}, {}
    for backend, step in steps.items():
        events = kernels_of(step)
        copies[backend] = sum(e.count for e in events if "DtoH" in e.key)
        kernels[backend] = {
            f"{e.count} x {e.key[:80]}": round(e.self_device_time_total, 1) for e in events[:SHOWN]
        }
    return {"copies_to_host": copies, "kernels": kernels}
