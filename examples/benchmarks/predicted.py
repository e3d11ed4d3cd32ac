# SPDX-License-Identifier: Apache-2.0
"""Compares the cost model with the rows measured on an H200, predicts Blackwell GPUs, and writes
PREDICTED.md.

    python examples/benchmarks/predicted.py [--count] [--out FILE]

Needs no GPU: it reads `results/`. With --count, after a change of a kernel, it counts instructions
in machine code anew (instructions.py), which needs NVRTC. It predicts

    the quantizers of kernels.json, from their bytes, instructions and launches;
    linear layers and a stack of experts, whole;
    steps of Llamas: BF16's step as measured, plus what the linears cost more under the recipe, on
    the GPU or on the host, whichever is more. (If the GPU limits one of the two steps and the host
    the other, this is an upper bound.) Under CUDA graphs only the GPU counts.

Blackwell GPUs are predicted by published rates of their GEMMs (q2compile/cost_model/devices.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import instructions
from quantizers import BYTES, COLUMNS, ROWS
from rows import HERE, RESULTS
from workloads import (
    EXPERT_WIDTH,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    LINEAR_TOKENS,
    LLAMA,
    LLAMA_8B,
    LLAMA_8B_TOKENS,
    LLAMA_30M,
    LLAMA_BATCH,
    LLAMA_SEQUENCE,
    MOE_BATCH,
    MOE_SEQUENCE,
    MOE_WIDTH,
    SEQUENCE_30M,
    VOCABULARY_30M,
)

from q2compile.cost_model.devices import DATA_SHEETS, H200, Device
from q2compile.cost_model.predict import predict
from q2compile.cost_model.quantizers import counted as instructions_counted
from q2compile.cost_model.steps import Layer, bf16_steps, recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.tools.bench.cases import CASES, OTHERS, step_of

PAGE_FILE = HERE / "PREDICTED.md"
KERNELS, STEPS_WITHIN = 0.15, 0.20  # aims: the largest error of a prediction


@dataclass(frozen=True)
class Compared:
    """A row of the results and its prediction, both in this unit."""

    name: str
    predicted: float
    measured: float
    unit: str
    target: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())
    return [row for row in rows if "H200" in row["gpu"]]


def kernels() -> Iterator[Compared]:
    """Microseconds of every kernel, at the shapes that were measured."""
    for row in rows_of("kernels.json"):
        name, (rows, cols) = row["name"], row["shape"]
        if name not in (*OTHERS, *CASES):
            continue  # copies and host times: they set constants of the model
        predicted = 1e6 * step_of(name, rows * cols).seconds(H200)
        yield Compared(f"{name} {rows}x{cols}", predicted, row["microseconds"], "us", KERNELS)
    for row in rows_of("models.json"):
        if row["name"] == "quantize":
            predicted = 1e6 * step_of("quantize_46", ROWS * COLUMNS).seconds(H200)
            name = f"quantize {ROWS}x{COLUMNS}"
            yield Compared(name, predicted, row["microseconds"], "us", KERNELS)


def llama(
    tokens: int, hidden: int, inner: int, layers: int, key_values: int, words: int
) -> list[tuple[int, Layer]]:
    """(count, linear) of a Llama."""

    def of(n: int, k: int, **how: Any) -> Layer:
        return Layer(tokens, n, k, emulated=True, **how)

    return [
        (layers, of(hidden, hidden, x_users=3)),  # q
        (2 * layers, of(key_values, hidden, x_users=3)),  # k, v
        (layers, of(hidden, hidden, x_fuses=False)),  # o: attention writes x to memory
        (2 * layers, of(inner, hidden, x_users=2)),  # gate, up
        (layers, of(hidden, inner)),  # down
        (1, of(words, hidden)),  # lm_head
    ]


def linears_of(config: dict[str, Any], tokens: int) -> list[tuple[int, Layer]]:
    """(count, linear) of a Llama with a configuration of transformers."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return llama(
        tokens,
        hidden,
        config["intermediate_size"],
        config["num_hidden_layers"],
        hidden // heads * config["num_key_value_heads"],
        config["vocab_size"],
    )


def _30m(sequences: int) -> list[tuple[int, Layer]]:
    size = LLAMA_30M
    tokens, hidden = sequences * SEQUENCE_30M, size.hidden
    return llama(tokens, hidden, size.intermediate, size.layers, hidden, VOCABULARY_30M)


def _times(recipe: str, layers: list[tuple[int, Layer]]) -> tuple[float, float, float, float]:
    """Milliseconds of the linears: GPU under the recipe, GPU in BF16, host likewise."""
    of = resolve(recipe)
    own = [(n, s) for n, layer in layers for s in recipe_steps(of, layer, GEMMS)]
    bf16 = [(n, s) for n, layer in layers for s in bf16_steps(layer, GEMMS)]
    gpu = [1e3 * sum(n * s.seconds(H200) for n, s in steps) for steps in (own, bf16)]
    host = [1e3 * sum(n * s.host_seconds for n, s in steps) for steps in (own, bf16)]
    return gpu[0], gpu[1], host[0], host[1]


def linears() -> Iterator[Compared]:
    """Milliseconds of single layers, under quartet2 and in BF16."""
    tokens = MOE_BATCH * MOE_SEQUENCE * EXPERTS_PER_TOKEN
    experts = Layer(
        *(tokens, 2 * EXPERT_WIDTH, MOE_WIDTH, EXPERTS),
        grouped=True,
        x_fuses=False,
        emulated=True,
    )
    layers = {"moe_grouped_gemm": experts} | {
        f"linear_4096_{n}": Layer(LINEAR_TOKENS, n, 4096, emulated=True, x_fuses=False)
        for n in (4096, 14336)
    }
    for row in [*rows_of("models.json"), *rows_of("moe.json")]:
        if row["name"] in layers:
            own, bf16, *_ = _times("quartet2", [(1, layers[row["name"]])])
            yield Compared(f"{row['name']}, BF16", bf16, row["bf16"], "ms", STEPS_WITHIN)
            yield Compared(row["name"], own, row["value"], "ms", STEPS_WITHIN)


STEPS = {
    "llama_step": ("quartet2", linears_of(LLAMA, LLAMA_BATCH * LLAMA_SEQUENCE)),
    "llama_8b_step": ("quartet2", linears_of(LLAMA_8B, LLAMA_8B_TOKENS)),
    "llama_30m_8x512": ("quartet2", _30m(8)),
    "llama_30m_64x512": ("quartet2", _30m(64)),
    "llama_30m_64x512_graphs": ("quartet2", _30m(64)),
} | {f"{r}_30m_64x512": (r, _30m(64)) for r in ("nvfp4", "tetrajet2", "quartet", "mxfp4")}


def steps() -> Iterator[Compared]:
    """Milliseconds of whole steps."""
    for row in [*rows_of("models.json"), *rows_of("steps.json")]:
        if row["name"] not in STEPS:
            continue
        own, bf16, host, bf16_host = _times(*STEPS[row["name"]])
        more = own - bf16
        if not row["name"].endswith("_graphs"):
            more = max(more, host - bf16_host)
        yield Compared(row["name"], row["bf16"] + more, row["value"], "ms", STEPS_WITHIN)


PER_LINEAR = "host_us_per_linear"


def of_the_host() -> Iterator[Compared]:
    """Host microseconds of one linear of a training step."""
    layer = Layer(128, 128, 128, bias=True, emulated=True)
    for row in rows_of("steps.json"):
        if row["name"] == PER_LINEAR:
            *_, own, bf16 = _times("quartet2", [(1, layer)])
            predicted = row["bf16"] + 1e3 * (own - bf16)
            yield Compared(PER_LINEAR, predicted, row["value"], "us", STEPS_WITHIN)


def missing() -> list[str]:
    """Names of rows that are predicted and have not been measured."""
    files = ("models.json", "steps.json", "kernels.json")
    found = {row["name"] for file in files for row in rows_of(file)}
    return [name for name in (*STEPS, PER_LINEAR, *BYTES) if name not in found]


def table(rows: Iterable[Compared]) -> str:
    """As Markdown."""
    lines = ["| row | predicted | measured | predicted over measured | |", "|---|---|---|---|---|"]
    for row in rows:
        digits = 1 if row.unit == "us" else 2
        predicted, measured = (f"{n:.{digits}f} {row.unit}" for n in (row.predicted, row.measured))
        missed = "missed" if abs(row.error) > row.target else ""
        lines.append(
            f"| `{row.name}` | {predicted} | {measured} | {1 + row.error:.2f} | {missed} |"
        )
    return "\n".join(lines)


BLACKWELLS = tuple(device for device in DATA_SHEETS if not device.emulates)
RECIPES = ("quartet2", "tetrajet2", "nvfp4", "quartet", "mxfp4")
GAINS = ((8192, 4096, 4096), (8192, 14336, 4096), (16384, 24576, 6144))
_TE, _TORCHAO = "github.com/NVIDIA/TransformerEngine/pull/2412", "github.com/pytorch/ao/pull/4487"
_BYTES = 2 + 9 / 16  # of an element that is read in bf16 and written in NVFP4
_MORE_BYTES = 9 / 16  # written columnwise, too
_TORCHAO_ELEMENTS = 2048 * 28672
# A case; the kernel of others that it is nearest to; its GPU, picoseconds an element, source.
PUBLISHED = (
    ("quantize_rtn", "Transformer Engine, row", "B300", _BYTES / 7.2, _TE),
    ("nvfp4_dgrad_row", "Transformer Engine, row, SR", "B300", _BYTES / 7.0, _TE),
    ("nvfp4_both", "Transformer Engine, both, SR", "B300", (_BYTES + _MORE_BYTES) / 4.5, _TE),
    ("nvfp4_x_both", "torchao, CuTe DSL", "GB200", 67.94e6 / _TORCHAO_ELEMENTS, _TORCHAO),
    ("nvfp4_x_both", "torchao, Triton", "GB200", 113.74e6 / _TORCHAO_ELEMENTS, _TORCHAO),
)
PUBLISHED_ELEMENTS = 16384 * 8192  # of the predictions beside them


def rates() -> str:
    """Peaks, shares of them and their sources, as Markdown."""
    lines = [
        "| GPU | GEMM | peak, TFLOP/s | share reached | TFLOP/s | source of the share |",
        "|---|---|---|---|---|---|",
    ]
    for device in DATA_SHEETS:
        for kind, rate in device.gemms.items():
            lines.append(
                f"| {device.name} | {kind} | {rate.peak / 1e12:.5g} | {rate.share:.3g} "
                f"| {rate.reached / 1e12:.0f} | {rate.source} |"
            )
    return "\n".join(lines)


def gains() -> str:
    """Predicted times of linears over BF16's, as Markdown."""
    lines = [
        "| recipe, T x N x K | " + " | ".join(device.name for device in BLACKWELLS) + " |",
        "|---" * (1 + len(BLACKWELLS)) + "|",
    ]
    for recipe in RECIPES:
        for shape in GAINS:
            own = " | ".join(f"{_time(recipe, shape, device):.2f}" for device in BLACKWELLS)
            lines.append(f"| {recipe}, {' x '.join(map(str, shape))} | {own} |")
    return "\n".join(lines)


def quantizers() -> str:
    """Predicted microseconds of the quantizers of a linear, as Markdown."""
    lines = [
        "| recipe | " + " | ".join(device.name for device in BLACKWELLS) + " |",
        "|---" * (1 + len(BLACKWELLS)) + "|",
    ]
    for recipe in RECIPES:
        steps = recipe_steps(resolve(recipe), Layer(*GAINS[0]), list(GEMMS))
        own = [step for step in steps if step.quantizer is not None]
        sums = (1e6 * sum(step.seconds(device) for step in own) for device in BLACKWELLS)
        lines.append(f"| {recipe} | {' | '.join(f'{each:.0f}' for each in sums)} |")
    return "\n".join(lines)


def published() -> str:
    """Quantizers of others as published, beside the nearest predicted one, as Markdown."""
    lines = [
        "| case | GPU | predicted, ps | published, ps | of | source |",
        "|---|---|---|---|---|---|",
    ]
    devices = {device.name: device for device in DATA_SHEETS}
    for case, of, gpu, picoseconds, source in PUBLISHED:
        seconds = step_of(case, PUBLISHED_ELEMENTS).seconds(devices[gpu])
        own = f"{1e12 * seconds / PUBLISHED_ELEMENTS:.2f}"
        lines.append(f"| `{case}` | {gpu} | {own} | {picoseconds:.2f} | {of} | {source} |")
    return "\n".join(lines)


def _time(recipe: str, shape: tuple[int, ...], device: Device) -> float:
    """Time over BF16's, forward and backward, with x quantized in its producer."""
    found = predict(resolve(recipe), shape)
    assert found is not None
    return 1 / found.speed(device)


PAGE = """\
# Predicted and measured

Written by `python examples/benchmarks/predicted.py` from the cost model (`q2compile/cost_model`)
and the rows of `results/` that were measured on an H200. Each row in `results/` has its date, its
versions and its command. The aims are {kernels:.0%} for kernels and {steps:.0%} for layers and
steps. A row that misses its aim says "missed".

## Kernels

All launches of a call. Five constants of the model were fitted to these rows: the share of the
issue slots that a quantizer fills, with and without stochastic rounding; the share of the
bandwidth; the constant part of a launch (all in `q2compile/cost_model/devices.py`); and the issue
slots of a tensor-core instruction (`instructions.py`). The rest follows from bytes and from
instructions counted in machine code.

The rows were measured before the kernels took fewer instructions (KERNEL_LOG.md, from "two lanes
swap half of their elements" on); predictions are of today's kernels. Three are known misses.
`requantize_bf16`: its dequantized columns take longer than their bytes say. `nvfp4_x_both` at
16384 x 8192 and `nvfp4_dgrad_row` at 8192 x 4096: 14% and 15% low by the instructions of that time.

{kernel_table}

## Layers and steps

For a linear, BF16's time is predicted, too. Its share of the peak was fitted to
`linear_4096_4096, BF16`. For a step of a Llama the prediction is BF16's measured step plus what the
linears cost more, on the GPU or on the host, whichever is more. Under CUDA graphs only the GPU
counts. No constant was fitted to these rows. The model groups launches of the forward's quantizers;
the rows of 64 x 512 tokens without CUDA graphs were measured before the kernels were grouped, with
some five more launches per linear.

At 8 x 512 tokens the host limits the step. There a linear costs the host more than the calls that
`host_us_per_call` measures: allocating buffers, and autograd saving three times as many tensors as
in BF16, are not in the model. `host_us_per_linear` shows the difference for a linear that shares no
launch and has nothing to fuse with.

{step_table}

## Blackwell

Nothing here was measured by this project. Peaks are dense, by data sheet. The share of a peak that
a large GEMM reaches comes from published measurements where there are any; the source is beside it.
A share above 1 belongs to a card that runs above its listed clock. Quantizers are assumed to reach
the bandwidth and the issue slots that they reach on an H200. Their instructions were counted with
NVRTC {nvrtc} on {counted} (`python examples/benchmarks/predicted.py --count`).

{rates}

Predicted time over BF16's, forward and backward of one linear:

{gains}

Predicted microseconds of all quantizers of the first of these linears:

{quantizers}

The authors of Quartet II report 4.2 times BF16's speed on an RTX 5090 and up to 2.5 times on a B200
for the layers of a 22B model (16384 x 24576 x 6144), with GEMMs of their own.

Picoseconds per element of quantizers that others measured, beside the nearest of these. Predictions
are of 16384 x 8192 elements and include all launches. Published times leave out the pass that finds
the amax, which these kernels don't need; torchao's takes 0.67 ps more. Transformer Engine's times
follow from its TB/s (65536 x 7168), if these count {bytes} bytes per element rowwise, and {both}
rowwise and columnwise; its columns are not rotated. torchao measured 2048 x 28672 elements.

{published}

## Not measured yet

{missing}
"""


def page() -> str:
    names = ", ".join(f"`{name}`" for name in missing())
    counted = json.loads(instructions.COUNTED.read_text(encoding="utf-8"))
    return PAGE.format(
        kernels=KERNELS,
        steps=STEPS_WITHIN,
        kernel_table=table(kernels()),
        nvrtc=counted["nvrtc"],
        counted=counted["date"],
        rates=rates(),
        gains=gains(),
        quantizers=quantizers(),
        published=published(),
        bytes=_BYTES,
        both=_BYTES + _MORE_BYTES,
        step_table=table((*linears(), *steps(), *of_the_host())),
        missing=f"{names}." if names else "Every row that is predicted has been measured.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count instructions anew first")
    parser.add_argument("--out", type=Path, default=PAGE_FILE)
    args = parser.parse_args()
    if args.count:
        instructions.write()
        instructions_counted.cache_clear()
    args.out.write_text(page(), encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
