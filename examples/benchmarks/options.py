"""What the options and passes that trade time for memory are worth, on one GPU.

    python examples/benchmarks/options.py [--only GROUP,...] [--out FILE]

Forward and backward of four layers of the Llama of models.py, 8 x 2048 tokens, fp32 parameters,
bf16 autocast. Each line is quartet2 with one thing changed; time and peak memory are over those of
the first line of its group, in the same run:

    plain           a pass left out; recompute_weights
    checkpointed    gradient checkpointing of every layer; keep_packed
    micro_batches   four micro-batches of 2 x 2048 tokens; cache_weights

The peak is what a step allocates at most, parameters and gradients included.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from models import BATCH, GPU, LLAMA, SEQUENCE, record
from training_step import Step

from q2compile.tools.bench.timing import in_turns

LAYERS = 4
PASSES = ("share_operands", "pair_directions", "share_rotations", "widen_operands")
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {
        "quartet2": {},
        **{f"without {name}": {"disable_passes": [name]} for name in PASSES},
        "recompute_weights": {"recompute_weights": True},
    },
    "checkpointed": {"quartet2": {}, "keep_packed": {"keep_packed": True}},
    "micro_batches": {"quartet2": {}, "cache_weights": {"cache_weights": True}},
}


def llama(group: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": LAYERS}, use_cache=False)
    model: Any = LlamaForCausalLM(config)
    model.to(GPU)
    if group == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def measure(group: str) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    model = llama(group)
    batches = 4 if group == "micro_batches" else 1
    tokens = torch.randint(LLAMA["vocab_size"], (batches, BATCH // batches, SEQUENCE), device=GPU)
    steps: dict[str, Step] = {}
    peaks: dict[str, int] = {}
    for name, options in GROUPS[group].items():
        compiled = torch.compile(model, backend="quartet2", options=dict(options))

        def step(compiled=compiled) -> None:
            model.zero_grad(set_to_none=True)
            for batch in tokens:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = compiled(input_ids=batch, labels=batch).loss
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0)  # a new version, as an optimizer's step makes

        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[name] = torch.cuda.max_memory_allocated()
        steps[name] = step
    times = in_turns(steps, calls=2)
    first = next(iter(times))
    return [
        {
            "name": f"{group}: {name}",
            "ratio": round(times[name] / times[first], 3),
            "unit": "quartet2 times",
            "milliseconds": round(times[name], 2),
            "peak_ratio": round(peaks[name] / peaks[first], 3),
            "peak_gib": round(peaks[name] / 2**30, 2),
        }
        for name in times
    ]


def main() -> None:
    record("options", __doc__, {group: partial(measure, group) for group in GROUPS})


if __name__ == "__main__":
    main()
