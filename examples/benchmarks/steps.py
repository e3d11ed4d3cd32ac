"""Times whole training steps of Hugging Face Llamas against plain Inductor, on one GPU.

    python examples/benchmarks/steps.py [--only NAME,...] [--out FILE]

A step is forward and backward, fp32 parameters, bf16 autocast. Ratios are within this run:

    llama_30m_64x512          30M parameters (examples/pretraining), 64 x 512 tokens; over BF16
    llama_30m_64x512_graphs   the same under mode="reduce-overhead", both
    llama_30m_8x512           8 x 512 tokens, where the host is the limit
    RECIPE_30m_64x512         the other recipes; `kernels` is the time of its kernels over BF16's
                              step, what a step with nothing else would take
    llama_8b_step             width 4096, MLP 14336, 32 layers, 1 x 4096 tokens, bf16 parameters;
                              llama_8b_peak_memory, llama_8b_first_step (empty caches) beside it
    llama_8b_step_kept        the same with recompute_weights=False, llama_8b_kept_peak_memory and
                              llama_8b_kept_first_step beside it
    llama_8b_step_unfused     the same with fuse_rotations=False, and likewise
    host_us_per_call          microseconds of the host for a call of an op of two launches in a
                              compiled graph, its buffers included: not a ratio
    host_us_per_linear        likewise for one linear more in a forward and backward, with what
                              autograd keeps of it; `bf16` is BF16's

`launches` counts the kernels of a step, `kernel_milliseconds` adds up their times.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import GPU, record
from training_step import Step, first_seconds, training_step
from transformers import LlamaConfig, LlamaForCausalLM

from q2compile.tools.bench.host import per_call, per_linear
from q2compile.tools.bench.timing import in_turns

sys.path.insert(0, str(Path(__file__).parents[1]))
from pretraining.model import SIZES, build_model

VOCABULARY, SEQUENCE = 4096, 512
EIGHT_B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
OTHERS = ("nvfp4", "tetrajet2", "quartet", "mxfp4")


def kernels_of(step: Step) -> tuple[int, float]:
    """How many kernels a step launches, and milliseconds of them together."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total]
    return sum(e.count for e in events), sum(e.self_device_time_total for e in events) / 1e3


def small(names: Mapping[str, tuple[str, int, str | None]]) -> list[dict[str, Any]]:
    """Rows of the 30M Llama: name -> (recipe, sequences, mode), all of one number of sequences and
    one mode, in turns with BF16."""
    (sequences, mode), *others = {row[1:] for row in names.values()}
    assert not others
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: torch.nn.Module = build_model(SIZES["30m"], VOCABULARY, SEQUENCE)
    model.to(GPU)
    tokens = torch.randint(VOCABULARY, (sequences, SEQUENCE), device=GPU)
    in_mode = {} if mode is None else {"mode": mode}
    steps = {"bf16": training_step(model, tokens, **in_mode)}
    for name, (recipe, *_) in names.items():
        options = {"recipe": recipe, **in_mode}
        steps[name] = training_step(model, tokens, backend="quartet2", options=options)
    times = in_turns(steps, rounds=10, calls=4)
    rows = []
    for name in names:
        own: dict[str, Any] = {}
        if mode is None:
            launches, busy = kernels_of(steps[name])
            own = {"launches": launches, "kernel_milliseconds": round(busy, 2)}
            own["kernels"] = round(busy / times["bf16"], 3)
            own["bf16_launches"], bf16_busy = kernels_of(steps["bf16"])
            own["bf16_kernel_milliseconds"] = round(bf16_busy, 2)
        rows.append({**_row(name, times[name], times["bf16"], "BF16 times"), **own})
    return rows


def _row(name: str, own: float, bf16: float, unit: str) -> dict[str, Any]:
    values = {"value": round(own, 3), "bf16": round(bf16, 3)}
    return {"name": name, "ratio": round(own / bf16, 3), "unit": unit, **values}


def large(names: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the 8B Llama, by the options of each, in turns with BF16."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens = torch.randint(EIGHT_B["vocab_size"], (1, 4096), device=GPU)
    with torch.device(GPU):
        model: Any = LlamaForCausalLM(LlamaConfig(**EIGHT_B, use_cache=False)).bfloat16()
    variants: dict[str, dict[str, Any]] = {"bf16": {}}
    for name, options in names.items():
        variants[name] = {"backend": "quartet2", "options": options}
    steps, first, peaks = {}, {}, {}
    for name, compile_with in variants.items():
        step = steps[name] = training_step(model, tokens, **compile_with)
        gc.collect()
        first[name] = first_seconds(step)
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        print(
            name, "first step", round(first[name], 1), "s, peak", round(peaks[name], 2), flush=True
        )
    times = in_turns(steps, rounds=6, calls=1)
    rows = [
        _row(name, times[name], times["bf16"], "BF16 times") for name in variants if name != "bf16"
    ]
    for name, values, unit in (("peak_memory", peaks, "BF16 peaks"), ("first_step", first, "BF16")):
        for variant in steps:
            if variant != "bf16":
                row = variant.replace("_step", "", 1) + f"_{name}"
                rows.append(_row(row, values[variant], values["bf16"], unit))
    return rows


def host() -> list[dict[str, Any]]:
    """The host's part (q2compile/tools/bench/host.py)."""
    each = {"name": "host_us_per_call", "ratio": round(per_call(GPU), 2), "unit": "microseconds"}
    own, bf16 = (per_linear(GPU, backend) for backend in ("quartet2", "inductor"))
    linear = {"name": "host_us_per_linear", "ratio": round(own, 2), "unit": "microseconds"}
    return [each, {**linear, "value": round(own, 2), "bf16": round(bf16, 2)}]


BENCHMARKS: dict[str, Callable[[], Any]] = {
    "host": host,
    "30m_8x512": partial(small, {"llama_30m_8x512": ("quartet2", 8, None)}),
    "30m_64x512": partial(
        small,
        {"llama_30m_64x512": ("quartet2", 64, None)}
        | {f"{recipe}_30m_64x512": (recipe, 64, None) for recipe in OTHERS},
    ),
    "30m_graphs": partial(small, {"llama_30m_64x512_graphs": ("quartet2", 64, "reduce-overhead")}),
    "8b": partial(large, {"llama_8b_step": {}, "llama_8b_step_kept": {"recompute_weights": False}}),
    "8b_unfused": partial(large, {"llama_8b_step_unfused": {"fuse_rotations": False}}),
}


def main() -> None:
    record("steps", __doc__, BENCHMARKS)


if __name__ == "__main__":
    main()
