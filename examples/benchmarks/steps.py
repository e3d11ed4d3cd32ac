# SPDX-License-Identifier: Apache-2.0
"""Times forward and backward of layers and models against plain Inductor.

    python examples/benchmarks/steps.py [--only NAME,...] [--out FOLDER]

On one GPU, within one run: the variants are interleaved, and a row has the median. BF16 is the same
module under torch.compile's default backend. Models have fp32 parameters and bf16 autocast unless
said otherwise. Names, and the rows that each makes:

    linears         linear_K_N: a bf16 linear, 16384 tokens, K -> N
    llama           llama_step: a Llama of 8 layers, width 2048, 8 x 2048 tokens; llama_peak_memory,
                    llama_compile (the first step with empty caches, less a usual one), and
                    saved_bits, bits per element that its linears save for the backward
    30m_64x512      llama_30m_64x512: the 30M Llama of examples/pretraining, 64 x 512 tokens, and
                    RECIPE_30m_64x512 for the other recipes
    30m_8x512       llama_30m_8x512: 8 x 512 tokens, where the host is the limit
    30m_graphs      llama_30m_64x512_graphs: both under mode="reduce-overhead"
    8b              llama_8b_step: 32 layers of width 4096, bf16 parameters, 1 x 4096 tokens;
                    llama_8b_step_kept: recompute_weights=False. Each with its peak memory and the
                    time of its first step with empty caches
    8b_unfused      llama_8b_step_unfused: fuse_rotations=False, likewise
    8b_fp8          fp8_8b_step, quartet2_fp8_8b_step: those recipes, likewise
    8b_2x4096       fp8_8b_2x4096_step: 2 x 4096 tokens, likewise
    fp8             fp8_llama_step, fp8_30m_64x512_graphs: `llama` and `30m_graphs` under fp8
    moe_fp8         fp8_moe_step: `moe` under fp8
    8b_fp8_generated    fp8_8b_step_generated: without the CUDA kernels, as where there is no NVRTC;
                    beside fp8_8b_step
    8b_mxfp4        mxfp4_2d_8b_step, likewise;  8b_mxfp4_others: mxfp4_8b_step, quartet_8b_step
    8b_8layers      RECIPE_8b_8layers_step, RECIPE_8b_8layers_first_step: 8 of those layers, beside
                    torchao's float8 training
    8b_32layers     RECIPE_8b_32layers_step, ..._first_step: all layers, fp8 and tensorwise
    accumulation    RECIPE_accumulation_N, RECIPE_accumulation_N_cached: quartet2 and nvfp4 with
                    steps of N micro-batches of `8b`, 8 layers; with cache_weights=True
    fused           fused_llama_step, fused_llama_first_step: `llama` with fuse_rotations over
                    without; the first step with warm caches of kernels
    host            host_us_per_call: microseconds of the host for an op of two launches in a
                    compiled graph, its buffers included; host_us_per_linear: for one linear more in
                    a forward and backward
    moe             moe_step: Qwen3-MoE, 4 layers of 64 experts, 8 per token, bf16 parameters, 4 x
                    2048 tokens; moe_peak_memory
    moe_gemm        moe_grouped_gemm: one stack of experts, [64, 1536, 2048], 8192 tokens by 8
    options         quartet2 with one option changed, time and peak memory over quartet2's: plain,
                    with gradient checkpointing; 4 layers of `llama`
    telemetry       telemetry_every_100: a Llama of 2 layers with {"telemetry": {"every": 100}} over
                    without; telemetry_idle: a step that records nothing; telemetry_recorded: the
                    recorded step alone. Runs on a CPU, too, with a tiny Llama

`launches` counts the kernels of a step, `kernel_milliseconds` adds up their times, `kernels` is
that over BF16's step: what a step without gaps between its kernels would take.
"""

from __future__ import annotations

import copy
import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from alive import measured
from rows import Benchmark, Row, over_bf16, run
from telemetry_cost import telemetry_cost
from torch import nn
from workloads import (
    EXPERT_WIDTH,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    GPU,
    LINEAR_TOKENS,
    LINEARS,
    LLAMA,
    LLAMA_8B,
    LLAMA_8B_TOKENS,
    LLAMA_BATCH,
    LLAMA_SEQUENCE,
    MICRO_BATCHES,
    MOE,
    MOE_BATCH,
    MOE_SEQUENCE,
    MOE_WIDTH,
    SEQUENCE_30M,
    VOCABULARY_30M,
    ExpertStack,
    Step,
    first_seconds,
    launches_of,
    llama,
    llama_30m,
    mixture_of_experts,
    peak_gib,
    profiles_of,
    random_tokens,
    training_step,
)

import q2compile
from q2compile.tools.bench.host import per_call, per_linear
from q2compile.tools.bench.timing import in_turns
from q2compile.torch_internals.optimizer_steps import look_up_optimizers

BACKENDS = ("inductor", "quartet2")
RECIPES_30M = ("nvfp4", "tetrajet2", "quartet", "mxfp4")  # beside quartet2
TIMES, PEAKS, COMPILE_TIMES = "BF16 times", "BF16 peaks", "BF16 compile times"


# ---- layers --------------------------------------------------------------------------------------


def linears(args: Namespace) -> list[Row]:
    return [linear(inputs, outputs) for inputs, outputs in LINEARS]


def linear(inputs: int, outputs: int) -> Row:
    layer = nn.Linear(inputs, outputs, bias=False, device=GPU, dtype=torch.bfloat16)
    x = torch.randn(LINEAR_TOKENS, inputs, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(LINEAR_TOKENS, outputs, device=GPU, dtype=torch.bfloat16)
    times = in_turns(_layer_steps(layer, (x,), dy))
    return over_bf16(f"linear_{inputs}_{outputs}", times["quartet2"], times["inductor"], TIMES)


def _layer_steps(layer: nn.Module, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> dict:
    """Backend -> forward and backward, compiled."""
    steps: dict[str, Step] = {}
    torch._dynamo.reset()
    for backend in BACKENDS:
        compiled = torch.compile(layer, backend=backend)

        def step(compiled: Any = compiled) -> None:
            layer.zero_grad(set_to_none=True)
            inputs[0].grad = None
            compiled(*inputs).backward(dy)

        steps[backend] = step
        step()  # compiles
    return steps


def expert_stack(args: Namespace) -> list[Row]:
    torch.manual_seed(0)
    stack = ExpertStack().to(GPU, torch.bfloat16)
    tokens = MOE_BATCH * MOE_SEQUENCE
    scores = torch.randn(tokens, EXPERTS, device=GPU)
    chosen = scores.topk(EXPERTS_PER_TOKEN).indices.flatten()
    offs = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
    rows = EXPERTS_PER_TOKEN * tokens
    x = torch.randn(rows, MOE_WIDTH, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, 2 * EXPERT_WIDTH, device=GPU, dtype=torch.bfloat16)
    steps = _layer_steps(stack, (x, offs), dy)
    times = in_turns(steps)
    row = over_bf16("moe_grouped_gemm", times["quartet2"], times["inductor"], TIMES)
    return [{**row, **profiles_of(steps)}]


# ---- Llamas --------------------------------------------------------------------------------------


def whole_llama(args: Namespace) -> list[Row]:
    torch._dynamo.reset()
    steps, peaks, first = {}, {}, {}
    model, tokens = _llama()
    for backend in BACKENDS:
        step = steps[backend] = training_step(model, tokens, backend=backend)
        first[backend] = first_seconds(step)
        peaks[backend] = peak_gib(step)
    times = in_turns(steps, calls=2)
    bf16, own = ((first[name] - times[name] / 1e3) for name in BACKENDS)
    return [
        over_bf16("llama_step", times["quartet2"], times["inductor"], TIMES),
        over_bf16("llama_peak_memory", peaks["quartet2"], peaks["inductor"], PEAKS),
        over_bf16("llama_compile", own, bf16, COMPILE_TIMES),
        _saved_bits(model, tokens),
    ]


def _llama(**changed: Any) -> tuple[nn.Module, torch.Tensor]:
    tokens = random_tokens(LLAMA["vocab_size"], LLAMA_BATCH, LLAMA_SEQUENCE)
    return llama({**LLAMA, **changed}), tokens


def _saved_bits(model: nn.Module, tokens: torch.Tensor) -> Row:
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        report = q2compile.explain(model, input_ids=tokens, labels=tokens)
    linears = [row for row in report.to_json() if row["saved_elements"]]
    elements = sum(row["saved_elements"] for row in linears)
    bits = 8 * sum(row["saved_bytes"] for row in linears) / elements
    return {"name": "saved_bits", "ratio": round(bits, 3), "unit": "bits per element"}


def fused_llama(args: Namespace) -> list[Row]:
    model, tokens = _llama()
    steps: dict[str, Step] = {}
    first: dict[str, list[float]] = {"unfused": [], "fused": []}
    for _ in range(2):  # the second time with warm caches of kernels
        torch._dynamo.reset()
        for how in first:
            options = {"fuse_rotations": how == "fused"}
            steps[how] = training_step(model, tokens, backend="quartet2", options=options)
            first[how].append(first_seconds(steps[how]))
    times = in_turns(steps, calls=2)
    unit = "of that without fuse_rotations"
    begin = {how: seconds[-1] for how, seconds in first.items()}
    return [
        {"name": "fused_llama_step", "ratio": round(times["fused"] / times["unfused"], 3)}
        | {"unit": unit, "milliseconds": times},
        {"name": "fused_llama_first_step", "ratio": round(begin["fused"] / begin["unfused"], 3)}
        | {"unit": unit, "seconds": begin, "cold": {how: s[0] for how, s in first.items()}},
    ]


def small_llama(
    args: Namespace, recipes: Mapping[str, str], sequences: int, mode: str | None = None
) -> Iterator[Row]:
    """Rows of the 30M Llama: name -> recipe, all in turns with BF16."""
    torch._dynamo.reset()
    model = llama_30m()
    tokens = random_tokens(VOCABULARY_30M, sequences, SEQUENCE_30M)
    in_mode: Row = {} if mode is None else {"mode": mode}
    steps = {"bf16": training_step(model, tokens, **in_mode)}
    for name, recipe in recipes.items():
        options = {"recipe": recipe, **in_mode}
        steps[name] = training_step(model, tokens, backend="quartet2", options=options)
    times = in_turns(steps, rounds=10, calls=4)
    for name in recipes:
        own: Row = {}
        if mode is None:
            launches, busy = launches_of(steps[name])
            own = {"launches": launches, "kernel_milliseconds": round(busy, 2)}
            own["kernels"] = round(busy / times["bf16"], 3)
            own["bf16_launches"], bf16_busy = launches_of(steps["bf16"])
            own["bf16_kernel_milliseconds"] = round(bf16_busy, 2)
        yield {**over_bf16(name, times[name], times["bf16"], TIMES), **own}


def large_llama(
    args: Namespace, variants: Mapping[str, dict[str, Any]], sequences: int = 1
) -> list[Row]:
    """Rows of the 8B Llama: name -> options, all in turns with BF16."""
    torch._dynamo.reset()
    model = llama(LLAMA_8B, torch.bfloat16)
    tokens = random_tokens(LLAMA_8B["vocab_size"], sequences, LLAMA_8B_TOKENS)
    ours: Row = {name: {"backend": "quartet2", "options": own} for name, own in variants.items()}
    steps, first, peaks = {}, {}, {}
    for name, how in {"bf16": {}, **ours}.items():
        step = steps[name] = training_step(model, tokens, **how)
        gc.collect()
        first[name] = first_seconds(step)
        peaks[name] = peak_gib(step)
        print(f"{name}: first step {first[name]:.1f} s, peak {peaks[name]:.2f} GiB", flush=True)
    times = in_turns(steps, rounds=6, calls=1)
    rows = [over_bf16(name, times[name], times["bf16"], TIMES) for name in variants]
    for suffix, values, unit in (
        ("peak_memory", peaks, PEAKS),
        ("first_step", first, "BF16"),
    ):
        for name in variants:
            row = f"{name.replace('_step', '', 1)}_{suffix}"
            rows.append(over_bf16(row, values[name], values["bf16"], unit))
    return rows


def beside_torchao(
    args: Namespace, layers: int, recipes: Sequence[str], torchao: Sequence[str]
) -> list[Row]:
    """Rows of the 8B Llama with this many layers. torchao: recipes of its float8 training, which
    converts a copy of the model."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch._dynamo.reset()
    model = llama({**LLAMA_8B, "num_hidden_layers": layers}, torch.bfloat16)
    tokens = random_tokens(LLAMA_8B["vocab_size"], 1, LLAMA_8B_TOKENS)
    steps = {"bf16": training_step(model, tokens)}
    for recipe in recipes:
        how: Row = {"backend": "quartet2", "options": {"recipe": recipe}}
        steps[f"{recipe}_8b_{layers}layers"] = training_step(model, tokens, **how)
    for recipe in torchao:
        config = Float8LinearConfig.from_recipe_name(recipe)
        converted = convert_to_float8_training(copy.deepcopy(model), config=config)
        steps[f"torchao_{recipe}_8b_{layers}layers"] = training_step(converted, tokens)
    first = {}
    for name, step in steps.items():
        first[name] = first_seconds(step)
        print(f"{name}: first step {first[name]:.1f} s", flush=True)
    times = in_turns(steps, rounds=6, calls=1)
    return [
        over_bf16(f"{name}_{of}", values[name], values["bf16"], unit)
        for of, values, unit in (("step", times, TIMES), ("first_step", first, "BF16"))
        for name in list(steps)[1:]
    ]


def accumulation(args: Namespace) -> Iterator[Row]:
    torch._dynamo.reset()
    model = llama({**LLAMA_8B, "num_hidden_layers": 8}, torch.bfloat16)
    tokens = random_tokens(LLAMA_8B["vocab_size"], 1, LLAMA_8B_TOKENS)
    for count in MICRO_BATCHES:
        steps = {"bf16": training_step(model, tokens, count)}
        for recipe, cached in product(("quartet2", "nvfp4"), (False, True)):
            name = f"{recipe}_accumulation_{count}" + "_cached" * cached
            how: Row = {"options": {"recipe": recipe, "cache_weights": cached}}
            steps[name] = training_step(model, tokens, count, backend="quartet2", **how)
        for call in (*steps.values(), gc.collect, *steps.values()):  # compiles; then steady
            call()
        look_up_optimizers(at_once=True)  # else codes are kept only after some seconds
        times = in_turns(steps, rounds=6, calls=1)
        yield from (over_bf16(n, times[n], times["bf16"], TIMES) for n in list(steps)[1:])


def host(args: Namespace) -> list[Row]:
    own, bf16 = (per_linear(GPU, backend) for backend in ("quartet2", "inductor"))
    return [
        {"name": "host_us_per_call", "ratio": round(per_call(GPU), 2), "unit": "microseconds"},
        {"name": "host_us_per_linear", "ratio": round(own, 2), "unit": "microseconds"}
        | {"value": round(own, 2), "bf16": round(bf16, 2)},
    ]


# ---- a mixture of experts ------------------------------------------------------------------------


def _moe_steps(ways: Mapping[str, dict[str, Any]]) -> dict[str, Callable[[], Step]]:
    """Name -> what compiles the step with these arguments of torch.compile and runs it once."""
    torch._dynamo.reset()
    model = mixture_of_experts()
    tokens = random_tokens(MOE["vocab_size"], MOE_BATCH, MOE_SEQUENCE)

    def compiled_step(how: dict[str, Any]) -> Step:
        compiled: Any = torch.compile(model, **how)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            compiled(input_ids=tokens, labels=tokens).loss.backward()

        step()
        model.zero_grad(set_to_none=True)
        return step

    return {name: partial(compiled_step, how) for name, how in ways.items()}


def in_fp8(args: Namespace) -> Iterator[Row]:
    """Rows of models that have rows for quartet2."""
    options = {"recipe": "fp8"}
    torch._dynamo.reset()
    model, tokens = _llama()
    steps = {"inductor": training_step(model, tokens)}
    steps["fp8"] = training_step(model, tokens, backend="quartet2", options=options)
    times = in_turns(steps, calls=2)
    yield over_bf16("fp8_llama_step", times["fp8"], times["inductor"], TIMES)
    del model, steps
    gc.collect()
    yield from small_llama(args, {"fp8_30m_64x512_graphs": "fp8"}, 64, "reduce-overhead")


def moe_in_fp8(args: Namespace) -> list[Row]:
    ours = {"backend": "quartet2", "options": {"recipe": "fp8"}}
    ways: dict[str, dict[str, Any]] = {"inductor": {}, "fp8": ours}
    steps = {name: make() for name, make in _moe_steps(ways).items()}
    times = in_turns(steps, calls=2)
    return [over_bf16("fp8_moe_step", times["fp8"], times["inductor"], TIMES)]


def moe(args: Namespace) -> list[Row]:
    steps, allocated = {}, {}
    for backend, make in _moe_steps({name: {"backend": name} for name in BACKENDS}).items():
        steps[backend] = make()
        allocated[backend] = measured(steps[backend])
    times = in_turns(steps, calls=2)
    bf16, own = (allocated[backend]["peak"] for backend in BACKENDS)
    step = over_bf16("moe_step", times["quartet2"], times["inductor"], TIMES)
    peak = over_bf16("moe_peak_memory", own, bf16, PEAKS)
    return [{**step, **profiles_of(steps)}, {**peak, "allocated": allocated}]


# ---- options -------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"quartet2": {}, "recompute_weights": {"recompute_weights": True}},
    "checkpointed": {"quartet2": {}, "keep_packed": {"keep_packed": True}},
}


def options(args: Namespace) -> list[Row]:
    return [row for group in OPTIONS for row in _options_of(group)]


def _options_of(group: str) -> list[Row]:
    torch._dynamo.reset()
    model: Any = llama({**LLAMA, "num_hidden_layers": 4})
    if group == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tokens = random_tokens(LLAMA["vocab_size"], LLAMA_BATCH, LLAMA_SEQUENCE)
    steps, peaks = {}, {}
    for name, changed in OPTIONS[group].items():
        steps[name] = training_step(model, tokens, backend="quartet2", options=dict(changed))
        steps[name]()
        peaks[name] = peak_gib(steps[name])
    times = in_turns(steps, calls=2)
    first = next(iter(times))
    return [
        {
            "name": f"{group}: {name}",
            "ratio": round(times[name] / times[first], 3),
            "unit": "quartet2 times",
            "milliseconds": round(times[name], 2),
            "peak_ratio": round(peaks[name] / peaks[first], 3),
            "peak_gib": round(peaks[name], 2),
        }
        for name in times
    ]


# ---- all of them ---------------------------------------------------------------------------------

_30M = {"llama_30m_64x512": "quartet2"} | {f"{name}_30m_64x512": name for name in RECIPES_30M}
_8B = {"llama_8b_step": {}, "llama_8b_step_kept": {"recompute_weights": False}}
_UNFUSED = {"llama_8b_step_unfused": {"fuse_rotations": False}}
_FP8, _MXFP4, _MXFP4_OTHERS = (
    {f"{name}_8b_step": {"recipe": name} for name in names}
    for names in (("fp8", "quartet2_fp8"), ("mxfp4_2d",), ("mxfp4", "quartet"))
)
# The last of them: kernels are disabled for what is compiled from then on.
_GENERATED: dict[str, dict[str, Any]] = {
    "fp8_8b_step": {"recipe": "fp8"},
    "fp8_8b_step_generated": {
        "recipe": "fp8",
        "disable_kernels": ["quantize.cuda", "transpose.cuda"],
    },
}
_8_LAYERS, _TORCHAO = ("fp8", "quartet2_fp8", "quartet2", "mxfp4_2d"), ("tensorwise", "rowwise")
_GRAPHS, _8X512 = ({f"llama_30m_{of}": "quartet2"} for of in ("64x512_graphs", "8x512"))
BENCHMARKS = {
    "linears": Benchmark(linears, "models.json"),
    "llama": Benchmark(whole_llama, "models.json"),
    "30m_64x512": Benchmark(partial(small_llama, recipes=_30M, sequences=64), "steps.json"),
    "30m_8x512": Benchmark(partial(small_llama, recipes=_8X512, sequences=8), "steps.json"),
    "30m_graphs": Benchmark(
        partial(small_llama, recipes=_GRAPHS, sequences=64, mode="reduce-overhead"), "steps.json"
    ),
    "8b": Benchmark(partial(large_llama, variants=_8B), "steps.json"),
    "8b_unfused": Benchmark(partial(large_llama, variants=_UNFUSED), "steps.json"),
    "8b_fp8": Benchmark(partial(large_llama, variants=_FP8), "steps.json"),
    "8b_fp8_generated": Benchmark(partial(large_llama, variants=_GENERATED), "steps.json"),
    "8b_8layers": Benchmark(
        partial(beside_torchao, layers=8, recipes=_8_LAYERS, torchao=_TORCHAO), "steps.json"
    ),
    "8b_32layers": Benchmark(
        partial(beside_torchao, layers=32, recipes=("fp8",), torchao=_TORCHAO[:1]), "steps.json"
    ),
    "8b_2x4096": Benchmark(
        partial(large_llama, variants={"fp8_8b_2x4096_step": {"recipe": "fp8"}}, sequences=2),
        "steps.json",
    ),
    "fp8": Benchmark(in_fp8, "steps.json"),
    "moe_fp8": Benchmark(moe_in_fp8, "steps.json"),
    "8b_mxfp4": Benchmark(partial(large_llama, variants=_MXFP4), "steps.json"),
    "8b_mxfp4_others": Benchmark(partial(large_llama, variants=_MXFP4_OTHERS), "steps.json"),
    "accumulation": Benchmark(accumulation, "steps.json"),
    "fused": Benchmark(fused_llama, "fusion.json"),
    "host": Benchmark(host, "steps.json"),
    "moe": Benchmark(moe, "moe.json"),
    "moe_gemm": Benchmark(expert_stack, "moe.json"),
    "options": Benchmark(options, "options.json"),
    "telemetry": Benchmark(telemetry_cost, "telemetry.json", ("mode", "rounds"), "either"),
}


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--mode", help="of Inductor, such as reduce-overhead: telemetry")
    parser.add_argument("--rounds", type=int, default=3, help="telemetry")
    run("steps", __doc__, BENCHMARKS, parser)


if __name__ == "__main__":
    main()
