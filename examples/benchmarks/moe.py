"""Times a mixture of experts against plain Inductor on one GPU: all of it, and one stack.

    python examples/benchmarks/moe.py [--only NAME,...] [--out FILE]

Ratios are within this run, on this machine; every linear is taken, the experts too:

    moe_step            forward and backward of Hugging Face's Qwen3-MoE (width 2048, 64 experts
                        of 768, 8 a token, 4 layers, 32 heads, 4 key-value heads, vocabulary
                        32000), 4 x 2048 tokens, bf16 parameters, experts by torch's grouped_mm;
                        over BF16
    moe_peak_memory     bytes allocated at the peak of that step, parameters and gradients
                        included; over BF16. `allocated` has what was there before the step, and
                        what is alive at the peak by the line that allocated it
    moe_step_added, moe_step_masked, moe_step_reduced
                        the same step without pass gather_scattered, without pass mask_again, and
                        with sums over a token's experts left to Inductor; over the step with all
    moe_grouped_gemm    forward and backward of one stack, [64, 1536, 2048], of 8192 tokens routed
                        to 8 experts each: its quantisers and its three grouped GEMMs; over BF16

BF16 is the same module under torch.compile's default backend. Times are medians of rounds in which
the two take turns. `copies_to_host` counts the copies from the device in a step's profile, which
the routing must not cause; `kernels` has the microseconds of the step's longest kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from models import BACKENDS, GPU, record
from torch import nn
from training_step import Step

from q2compile.tools.bench.alive import measured
from q2compile.tools.bench.timing import in_turns

EXPERTS, CHOSEN, WIDTH, INNER = 64, 8, 2048, 768
MODEL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
BATCH, SEQUENCE = 4, 2048
SHOWN = 30  # kernels


# What surrounds experts, each left out.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "moe_step_added": {"disable_passes": ["gather_scattered"]},
    "moe_step_masked": {"disable_passes": ["mask_again"]},
    "moe_step_reduced": {"inductor": {"unroll_reductions_threshold": 8}},
}


class Mixture:
    """The model, and its step in each way to compile it."""

    def __init__(self) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        torch._dynamo.reset()
        model: nn.Module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL, use_cache=False))
        model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        self.model = model.to(GPU, torch.bfloat16)
        self.tokens = torch.randint(MODEL["vocab_size"], (BATCH, SEQUENCE), device=GPU)

    def step(self, backend: str, **options: Any) -> Step:
        """Forward and backward, compiled and run once."""
        compiled = torch.compile(self.model, backend=backend, options=options or None)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            compiled(input_ids=self.tokens, labels=self.tokens).loss.backward()

        step()
        self.model.zero_grad(set_to_none=True)
        return step


def model() -> list[dict[str, Any]]:
    mixture = Mixture()
    steps: dict[str, Step] = {}
    peaks, allocated = {}, {}
    for backend in BACKENDS:
        steps[backend] = mixture.step(backend)
        allocated[backend] = measured(steps[backend])
        peaks[backend] = allocated[backend]["peak"]
    times = in_turns(steps, calls=2)
    return [
        {"name": "moe_step", **_ratio(times, "BF16 times"), **_profiles(steps)},
        {"name": "moe_peak_memory", **_ratio(peaks, "BF16 peaks"), "allocated": allocated},
    ]


def left_out() -> list[dict[str, Any]]:
    mixture = Mixture()
    ways: dict[str, dict[str, Any]] = {"all": {}, **LEFT_OUT}
    times = in_turns({name: mixture.step("quartet2", **way) for name, way in ways.items()}, calls=2)
    rows = ({"name": name, "ratio": round(times[name] / times["all"], 3)} for name in LEFT_OUT)
    return [{**row, "unit": "steps with all"} for row in rows]


class Stack(nn.Module):
    """The gate and up projections of all experts, rows of x sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.up.mT, offs=offs)


def grouped_gemm() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    stack = Stack().to(GPU, torch.bfloat16)
    tokens = BATCH * SEQUENCE
    chosen = torch.randn(tokens, EXPERTS, device=GPU).topk(CHOSEN).indices.flatten()
    offs = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
    x = torch.randn(CHOSEN * tokens, WIDTH, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(CHOSEN * tokens, 2 * INNER, device=GPU, dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    torch._dynamo.reset()
    for backend in BACKENDS:
        compiled = torch.compile(stack, backend=backend)

        def step(compiled=compiled) -> None:
            x.grad = stack.up.grad = None
            compiled(x, offs).backward(dy)

        steps[backend] = step
        step()  # compiles
    times = in_turns(steps)
    return [{"name": "moe_grouped_gemm", **_ratio(times, "BF16 times"), **_profiles(steps)}]


def _ratio(values: dict[str, float], unit: str) -> dict[str, Any]:
    bf16, own = (values[backend] for backend in BACKENDS)
    return {"ratio": round(own / bf16, 3), "unit": unit, "bf16": bf16, "quartet2": own}


def _profiles(steps: dict[str, Step]) -> dict[str, Any]:
    """Of a step under each backend: copies to the host, and its longest kernels, microseconds."""
    copies, kernels = {}, {}
    for backend, step in steps.items():
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if e.self_device_time_total]
        copies[backend] = sum(e.count for e in events if "DtoH" in e.key)
        longest = sorted(events, key=lambda e: -e.self_device_time_total)[:SHOWN]
        kernels[backend] = {
            f"{e.count} x {e.key[:80]}": round(e.self_device_time_total, 1) for e in longest
        }
    return {"copies_to_host": copies, "kernels": kernels}


BENCHMARKS = {"grouped_gemm": grouped_gemm, "model": model, "left_out": left_out}


def main() -> None:
    record("moe", __doc__, BENCHMARKS)


if __name__ == "__main__":
    main()
