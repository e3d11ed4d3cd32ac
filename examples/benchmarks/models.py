"""Times linear layers, a Llama and the fused quantisers against plain Inductor, on one GPU.

    python examples/benchmarks/models.py [--only NAME,...] [--out FILE]

Ratios are within this run, on this machine:

    linear_K_N              forward and backward of one bf16 linear, 16384 tokens, K -> N; over BF16
    llama_step              forward and backward of Hugging Face's Llama (width 2048, MLP 8192, 8
                            layers, 32 heads, 8 key-value heads, vocabulary 32000), 8 x 2048 tokens,
                            fp32 parameters, bf16 autocast; over BF16
    llama_peak_memory       bytes allocated at the peak of that step, parameters and gradients
                            included; over BF16
    llama_compile           time of its first step with empty caches, less a usual one; over BF16
    saved_bits              bits an element of what its linears keep for the backward
    quantize                4/6, 8192x4096, in copies of that tensor in bf16
    silu_mul_quantize       silu(gate) * up, then that
    add_rmsnorm_quantize    residual add, RMSNorm, then that

BF16 is the same module under torch.compile's default backend. Times are medians of rounds in which
the two take turns. Nothing here is faster than BF16 without Blackwell's FP4 units: the GEMMs of the
emulation are BF16 GEMMs, so a ratio is one plus the price of the quantisers.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import INPUTS, write
from torch.nn.functional import rms_norm, silu
from training_step import Step, first_seconds, training_step

import q2compile
from q2compile import lowering
from q2compile.tools.bench.timing import captured, in_turns, time_in_turns
from q2compile.torch_internals.patches import patched

RESULTS = Path(__file__).parent / "results"
TOKENS = 16384
ROWS, COLUMNS = 8192, 4096
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
BATCH, SEQUENCE = 8, 2048
GPU = torch.device("cuda")
BACKENDS = ("inductor", "quartet2")


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        layer = torch.nn.Linear(inputs, outputs, bias=False, device=GPU, dtype=torch.bfloat16)
        compiled = torch.compile(layer, backend=backend)
        x = torch.randn(TOKENS, inputs, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(TOKENS, outputs, device=GPU, dtype=torch.bfloat16)

        def step(compiled=compiled, layer=layer, x=x, dy=dy) -> None:
            x.grad = layer.weight.grad = None
            compiled(x).backward(dy)

        steps[backend] = step
        step()  # compiles
    times = in_turns(steps)
    return {"name": f"linear_{inputs}_{outputs}", **_ratio(times, "BF16 times")}


def _ratio(values: dict[str, float], unit: str) -> dict[str, Any]:
    bf16, own = (values[backend] for backend in BACKENDS)
    return {"ratio": round(own / bf16, 3), "unit": unit, "bf16": bf16, "quartet2": own}


def llama() -> list[dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    peaks, first = {}, {}
    tokens = torch.randint(LLAMA["vocab_size"], (BATCH, SEQUENCE), device=GPU)
    torch.manual_seed(0)
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))
    model.to(GPU)
    for backend in BACKENDS:
        step = steps[backend] = training_step(model, tokens, backend=backend)
        first[backend] = first_seconds(step)
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[backend] = torch.cuda.max_memory_allocated() / 2**30
    times = in_turns(steps, calls=2)
    compile_times = {name: first[name] - times[name] / 1e3 for name in BACKENDS}
    return [
        {"name": "llama_step", **_ratio(times, "BF16 times")},
        {"name": "llama_peak_memory", **_ratio(peaks, "BF16 peaks")},
        {"name": "llama_compile", **_ratio(compile_times, "BF16 compile times")},
        _saved_bits(model, tokens),
    ]


def _saved_bits(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        report = q2compile.explain(model, input_ids=tokens, labels=tokens)
    rows = [row for row in report.to_json() if row["saved_elements"]]
    elements = sum(row["saved_elements"] for row in rows)
    bits = 8 * sum(row["saved_bytes"] for row in rows) / elements
    return {"name": "saved_bits", "ratio": round(bits, 3), "unit": "bits an element"}


def quantisers() -> list[dict[str, Any]]:
    """One quantisation and what precedes it, as benchmarks/kernels.py times kernels: replays of a
    CUDA graph over rotating inputs, in turn with copies."""
    lowering.register()
    inputs = [
        [torch.randn(ROWS, COLUMNS, device=GPU).bfloat16() for _ in range(2)] for _ in range(INPUTS)
    ]
    weight = torch.randn(COLUMNS, device=GPU).bfloat16()
    target = torch.empty_like(inputs[0][0])

    def quantize(x):
        return torch.ops.q2.quantize(x, None, None, "nvfp4_46_pow2", 0)

    def silu_mul_quantize(gate, up):
        return quantize(silu(gate) * up)

    def add_rmsnorm_quantize(residual, x):
        residual = residual + x
        return residual, *quantize(rms_norm(residual, (COLUMNS,), weight, 1e-6))

    calls: dict[str, list[Step]] = {"copy": [partial(target.copy_, a) for a, _ in inputs]}
    for function in (quantize, silu_mul_quantize, add_rmsnorm_quantize):
        torch._dynamo.reset()
        compiled = torch.compile(function)
        used = 1 if function is quantize else 2
        calls[function.__name__] = [partial(compiled, *pair[:used]) for pair in inputs]
        with patched():  # as in a graph that q2compile compiles
            calls[function.__name__][0]()
    times = time_in_turns({name: captured(own) for name, own in calls.items()})
    copy = times.pop("copy")
    return [
        {
            "name": name,
            "ratio": round(statistics.median(a / b for a, b in zip(own, copy, strict=True)), 3),
            "unit": "bf16 device copies",
            "microseconds": round(statistics.median(own), 2),
            "kernels": device_kernels(calls[name][0]),
        }
        for name, own in times.items()
    ]


def device_kernels(call: Step) -> dict[str, float]:
    """The kernels of one call and their microseconds, from the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total]
    return {e.key[:60]: round(e.self_device_time_total, 2) for e in events}


BENCHMARKS: dict[str, Callable[[], Any]] = {
    "quantisers": quantisers,
    "linear_4096_4096": lambda: [linear(4096, 4096)],
    "linear_4096_14336": lambda: [linear(4096, 14336)],
    "llama": llama,
}


def record(script: str, description: str, benchmarks: dict[str, Callable[[], Any]]) -> None:
    """The command line of a script of this folder: runs its benchmarks, or those named by --only,
    prints their rows, and writes those of each to results/ when it is done."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", default=",".join(benchmarks))
    parser.add_argument("--out", type=Path, default=RESULTS / f"{script}.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"examples/benchmarks/{script}.py needs a CUDA device, and torch sees none.")
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.date.today().isoformat(),
        "command": f"python examples/benchmarks/{script}.py --only {args.only}",
    }
    for name in args.only.split(","):
        rows = list(benchmarks[name]())
        for row in rows:
            print(row, flush=True)
        write(args.out, [{**row, **about} for row in rows])


def main() -> None:
    record("models", __doc__, BENCHMARKS)


if __name__ == "__main__":
    main()
