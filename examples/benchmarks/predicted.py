# SPDX-License-Identifier: Apache-2.0
"""Compares the cost model with the rows measured on an H200, predicts Blackwell GPUs, and writes
PREDICTED.md.

    python examples/benchmarks/predicted.py [--count] [--all] [--out FILE]

Needs no GPU: it reads `results/`. --all prints every kernel and every GPU, where PREDICTED.md has
the kernels that miss their aim, and four GPUs. With --count, after a change of a kernel, it counts
instructions in machine code anew (instructions.py), which needs NVRTC. It predicts

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
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    MICRO_BATCHES,
    MOE_BATCH,
    MOE_SEQUENCE,
    MOE_WIDTH,
    SEQUENCE_30M,
    VOCABULARY_30M,
)

from q2compile.cost_model.devices import DATA_SHEETS, H200, Device
from q2compile.cost_model.layer import HOPPER, Layer
from q2compile.cost_model.predict import predict
from q2compile.cost_model.prices import bf16_steps, recipe_steps
from q2compile.cost_model.quantizers import counted as instructions_counted
from q2compile.cost_model.ranges import Range, longest, total
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.tools.bench.cases import CASES, OTHERS, step_of

PAGE_FILE = HERE / "PREDICTED.md"
KERNELS, STEPS_WITHIN = 0.15, 0.20  # aims: the largest error of a prediction


@dataclass(frozen=True)
class Compared:
    """A row of the results and its prediction, both in this unit."""

    name: str
    predicted: Range
    measured: float
    unit: str
    target: float

    @property
    def error(self) -> float:
        """The relative error of the middle."""
        return self.predicted.middle / self.measured - 1


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
        return Layer(tokens, n, k, capability=HOPPER, **how)

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


def _times(recipe: str, layers: list[tuple[int, Layer]]) -> tuple[Range, Range, Range, Range]:
    """Milliseconds of the linears: GPU under the recipe, GPU in BF16, host likewise."""
    of = resolve(recipe)
    own = [(n, s) for n, layer in layers for s in recipe_steps(of, layer, GEMMS)]
    bf16 = [(n, s) for n, layer in layers for s in bf16_steps(layer, GEMMS)]
    gpu = [1e3 * total(n * s.seconds(H200) for n, s in steps) for steps in (own, bf16)]
    host = [1e3 * total(n * s.host_seconds for n, s in steps) for steps in (own, bf16)]
    return gpu[0], gpu[1], host[0], host[1]


def linears() -> Iterator[Compared]:
    """Milliseconds of single layers, under quartet2 and in BF16."""
    tokens = MOE_BATCH * MOE_SEQUENCE * EXPERTS_PER_TOKEN
    experts = Layer(
        *(tokens, 2 * EXPERT_WIDTH, MOE_WIDTH, EXPERTS),
        grouped=True,
        x_fuses=False,
        capability=HOPPER,
    )
    layers = {"moe_grouped_gemm": experts} | {
        f"linear_4096_{n}": Layer(LINEAR_TOKENS, n, 4096, capability=HOPPER, x_fuses=False)
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
} | {f"{r}_30m_64x512": (r, _30m(64)) for r in ("nvfp4", "tetrajet2")}
# quartet's and mxfp4's steps were measured when their GEMMs on an H200 were BF16's.


def steps() -> Iterator[Compared]:
    """Milliseconds of whole steps."""
    for row in [*rows_of("models.json"), *rows_of("steps.json")]:
        if row["name"] not in STEPS:
            continue
        own, bf16, host, bf16_host = _times(*STEPS[row["name"]])
        more = own - bf16
        if not row["name"].endswith("_graphs"):
            more = longest(more, host - bf16_host)
        yield Compared(row["name"], more + row["bf16"], row["value"], "ms", STEPS_WITHIN)


PER_LINEAR = "host_us_per_linear"


def of_the_host() -> Iterator[Compared]:
    """Host microseconds of one linear of a training step."""
    layer = Layer(128, 128, 128, bias=True, capability=HOPPER)
    for row in rows_of("steps.json"):
        if row["name"] == PER_LINEAR:
            *_, own, bf16 = _times("quartet2", [(1, layer)])
            predicted = 1e3 * (own - bf16) + row["bf16"]
            yield Compared(PER_LINEAR, predicted, row["value"], "us", STEPS_WITHIN)


def missing() -> list[str]:
    """Names of rows that are predicted and have not been measured."""
    files = ("models.json", "steps.json", "kernels.json")
    found = {row["name"] for file in files for row in rows_of(file)}
    return [name for name in (*STEPS, PER_LINEAR, *BYTES) if name not in found]


def table(rows: Iterable[Compared]) -> str:
    """As Markdown."""
    lines = ["| row | predicted | measured | ratio |", "|---|---|---|---|"]
    for row in rows:
        digits = 1 if row.unit == "us" else 2
        predicted = f"{row.predicted.text(f'.{digits}f')} {row.unit}"
        measured = f"{row.measured:.{digits}f} {row.unit}"
        missed = ", missed" if abs(row.error) > row.target else ""
        ratio = (row.predicted / row.measured).text()
        lines.append(f"| `{row.name}` | {predicted} | {measured} | {ratio}{missed} |")
    return "\n".join(lines)


BLACKWELLS = tuple(device for device in DATA_SHEETS if not device.emulates)
SHOWN = ("B200", "B300", "RTX 5090", "RTX PRO 6000")  # in PREDICTED.md
RECIPES = (
    *("quartet2", "quartet2_search", "nvfp4", "tetrajet2", "quartet"),
    *("mxfp4", "mxfp4_2d", "fp8", "quartet2_fp8"),
)
GAINS = ((8192, 4096, 4096), (8192, 14336, 4096), (16384, 24576, 6144))
TRANSFORMER_ENGINE = "github.com/NVIDIA/TransformerEngine/pull/2412"
TORCHAO = "github.com/pytorch/ao/pull/4487"
_BYTES = 2 + 9 / 16  # of an element that is read in bf16 and written in NVFP4
_MORE_BYTES = 9 / 16  # written columnwise, too
_TORCHAO_ELEMENTS = 2048 * 28672
# A case; the kernel of others that it is nearest to; its GPU, picoseconds an element.
PUBLISHED = (
    ("quantize_rtn", "Transformer Engine, row", "B300", _BYTES / 7.2),
    ("nvfp4_dgrad_row", "Transformer Engine, row, SR", "B300", _BYTES / 7.0),
    ("nvfp4_both", "Transformer Engine, both, SR", "B300", (_BYTES + _MORE_BYTES) / 4.5),
    ("nvfp4_x_both", "torchao, CuTe DSL", "GB200", 67.94e6 / _TORCHAO_ELEMENTS),
    ("nvfp4_x_both", "torchao, Triton", "GB200", 113.74e6 / _TORCHAO_ELEMENTS),
)
PUBLISHED_ELEMENTS = 16384 * 8192  # of the predictions beside them


KINDS = ("bf16", "fp8", "fp4")


def rates(devices: Sequence[Device]) -> str:
    """Peaks, shares of them and their sources, as Markdown."""
    lines = [f"| GPU | {' | '.join(KINDS)} | source |", "|---" * (2 + len(KINDS)) + "|"]
    for device in devices:
        of = [device.gemms[kind] for kind in KINDS]
        cells = [f"{rate.peak / 1e12:.5g} x {rate.share.text()}" for rate in of]
        named = "; ".join(device.gemms[kind].source for kind in ("bf16", "fp4"))
        sources = dict.fromkeys(re.split(", |; ", named))
        lines.append(f"| {device.name} | {' | '.join(cells)} | {', '.join(sources)} |")
    return "\n".join(lines)


def gains(devices: Sequence[Device]) -> str:
    """Predicted times of the linears over BF16's, as Markdown."""
    lines = [f"| recipe | {' | '.join(device.name for device in devices)} |"]
    lines.append("|---" * (1 + len(devices)) + "|")
    for recipe in RECIPES:
        times = (", ".join(_time(recipe, shape, device) for shape in GAINS) for device in devices)
        lines.append(f"| `{recipe}` | {' | '.join(times)} |")
    return "\n".join(lines)


def accumulated(device: Device) -> str:
    """Times of the 8B Llama's linears over BF16's, by micro-batches, as Markdown."""
    linears = linears_of(LLAMA_8B, LLAMA_8B_TOKENS)
    layers = [(n, replace(layer, capability=device.capability)) for n, layer in linears]

    def seconds(recipe: str, w_quantized: int = 1) -> Range:
        found = ((n, replace(layer, w_quantized=w_quantized)) for n, layer in layers)
        if recipe == "bf16":
            each = ((n, bf16_steps(layer, GEMMS)) for n, layer in found)
        else:
            each = ((n, recipe_steps(resolve(recipe), layer, GEMMS)) for n, layer in found)
        return total(n * step.seconds(device) for n, steps in each for step in steps)

    bf16 = seconds("bf16")
    lines = [f"| recipe | without | with: {' | '.join(map(str, MICRO_BATCHES))} |"]
    lines.append("|---" * (2 + len(MICRO_BATCHES)) + "|")
    for recipe in ("quartet2", "nvfp4"):
        first, others = seconds(recipe), seconds(recipe, 0)
        times = [first, *((first + (n - 1) * others) / n for n in MICRO_BATCHES)]
        cells = " | ".join((time / bf16).text() for time in times)
        lines.append(f"| `{recipe}` | {cells} |")
    return "\n".join(lines)


def published() -> str:
    """Quantizers of others as published, beside the nearest predicted one, as Markdown."""
    lines = ["| case | GPU | predicted, ps | published, ps | of |", "|---|---|---|---|---|"]
    devices = {device.name: device for device in DATA_SHEETS}
    for case, of, gpu, picoseconds in PUBLISHED:
        seconds = step_of(case, PUBLISHED_ELEMENTS).seconds(devices[gpu])
        own = (1e12 * seconds / PUBLISHED_ELEMENTS).text()
        lines.append(f"| `{case}` | {gpu} | {own} | {picoseconds:.2f} | {of} |")
    return PUBLISHED_PAGE.format(
        table="\n".join(lines),
        engine=TRANSFORMER_ENGINE,
        torchao=TORCHAO,
        bytes=_BYTES,
        both=_BYTES + _MORE_BYTES,
    )


def _time(recipe: str, shape: tuple[int, ...], device: Device) -> str:
    """Time over BF16's, forward and backward, with x quantized in its producer."""
    found = predict(resolve(recipe), shape, devices=(device,))
    assert found is not None
    return found.over_bf16(device).text()


PAGE = """\
# Predicted and measured

Written by `python examples/benchmarks/predicted.py` from the cost model (`q2compile/cost_model`)
and the rows of `results/` that were measured on an H200. The aims are {kernels:.0%} for kernels and
{steps:.0%} for layers and steps; a row that misses it says "missed".{all}

## Kernels

The shares of issue slots and bandwidth and the constant part of a launch
(`q2compile/cost_model/devices.py`) were fitted to these rows; the rest is bytes and machine code.
The middles of {count} ranges are {least:.2f} to {most:.2f} of the measured times, which are older
than the kernels ([the log](KERNEL_LOG.md#fewer-instructions)).

{kernel_table}

## Layers and steps

For a Llama the prediction is BF16's measured step plus what the linears cost more, on the GPU or on
the host, whichever is more; under CUDA graphs only the GPU counts. BF16's share of the peak was
fitted to `linear_4096_4096, BF16`, and nothing to the other rows. At 8 x 512 tokens the host limits
the step; the model leaves out its buffers and saved tensors, as `host_us_per_linear` shows.

{step_table}

## Blackwell

Not measured by this project. Cells are dense TFLOP/s by data sheet, and the share that a large GEMM
reaches by published measurements; it exceeds 1 above the listed clock. Quantizers are assumed to
reach what they reach on an H200. Instructions: NVRTC {nvrtc}, {counted}.

{rates}

Predicted time over BF16's, forward and backward of one linear with the quantizer of x in what
computes x. At the low end of a range every constant favors the recipe, at the high end none does.
T x N x K is, in this order, {shapes}:

{gains}

The authors of Quartet II report 4.2 times BF16's speed on an RTX 5090 and up to 2.5 times on a B200
for the layers of a 22B model (the last shape), with GEMMs of their own. The linears of the 8B Llama
on a {device}, without and with `cache_weights` in steps of so many micro-batches, over BF16's:

{accumulated}
{published}{missing}"""

# With --all.
PUBLISHED_PAGE = """
Picoseconds per element of quantizers that others measured
({engine},
{torchao}), beside the nearest of these at 16384 x 8192. Published times
leave out the pass that finds the amax, which these kernels don't need; torchao's takes 0.67 ps
more. Transformer Engine's follow from its TB/s, at {bytes} and {both} bytes per element.

{table}
"""


def page(everything: bool = False) -> str:
    """PREDICTED.md; with every kernel and GPU if ``everything``."""
    rows = list(kernels())
    errors = [1 + row.error for row in rows]
    whole = (*linears(), *steps(), *of_the_host())
    shown = rows if everything else [row for row in rows if abs(row.error) > row.target]
    devices = (
        BLACKWELLS if everything else [d for name in SHOWN for d in BLACKWELLS if d.name == name]
    )
    names = ", ".join(f"`{name}`" for name in missing())
    counted = json.loads(instructions.COUNTED.read_text(encoding="utf-8"))
    return PAGE.format(
        all="" if everything else " `--all` prints the other rows.",
        kernels=KERNELS,
        steps=STEPS_WITHIN,
        count=len(rows),
        least=min(errors),
        most=max(errors),
        kernel_table=table(shown),
        nvrtc=counted["nvrtc"],
        counted=counted["date"],
        rates=rates(devices),
        shapes=", ".join(" x ".join(map(str, shape)) for shape in GAINS),
        gains=gains(devices),
        device=devices[0].name,
        accumulated=accumulated(devices[0]),
        published=published() if everything else "",
        step_table=table(row for row in whole if everything or not row.name.endswith("BF16")),
        missing=f"\nNot measured yet: {names}.\n" if names else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count instructions anew first")
    parser.add_argument("--all", action="store_true", help="print every kernel and GPU; no file")
    parser.add_argument("--out", type=Path, default=PAGE_FILE)
    args = parser.parse_args()
    if args.count:
        instructions.write()
        instructions_counted.cache_clear()
    if args.all:
        print(page(everything=True))
        return
    args.out.write_text(page(), encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
