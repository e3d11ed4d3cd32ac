"""What the cost model predicts of the rows that were measured on an H200, beside them.

    python examples/benchmarks/predicted.py [--out FILE]

Needs no GPU: it reads `results/` and writes `PREDICTED.md`. Predicted are

    the quantisers of kernels.json, from their bytes, instructions and launches;
    linear layers and a stack of experts, whole;
    steps of Llamas: BF16's step as measured, and what its linears take more under the recipe by the
    prediction, on the GPU or on the host, whichever is more. (A step that one of the two bounds
    in BF16 and the other under the recipe takes less than that.) Under CUDA graphs the GPU alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import BYTES
from models import BATCH, COLUMNS, LLAMA, ROWS, TOKENS
from models import SEQUENCE as LONG
from moe import BATCH as MOE_BATCH
from moe import CHOSEN, EXPERTS, INNER, WIDTH
from moe import SEQUENCE as MOE_SEQUENCE
from steps import EIGHT_B, SEQUENCE, VOCABULARY

from q2compile.cost_model.devices import H200
from q2compile.cost_model.steps import Layer, bf16_steps, recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.tools.bench.cases import CASES, OTHERS, step_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from pretraining.model import SIZES

RESULTS = Path(__file__).parent / "results"
PAGE_FILE = Path(__file__).parent / "PREDICTED.md"
KERNELS, STEPS_WITHIN = 0.15, 0.20  # what is aimed at: the greatest error of a prediction


@dataclass(frozen=True)
class Compared:
    """A row of the results and its prediction, in `unit`s."""

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
    """Microseconds of every quantiser and of dequantize, at the shapes that were measured."""
    for row in rows_of("kernels.json"):
        name, (rows, cols) = row["name"], row["shape"]
        if name not in (*OTHERS, *CASES):
            continue  # copies, and what the host takes: the model's own constants
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
    """The linears of a Llama, and how many there are of each."""

    def of(n: int, k: int, **how: Any) -> Layer:
        return Layer(tokens, n, k, emulated=True, **how)

    return [
        (layers, of(hidden, hidden, x_users=3)),  # q
        (2 * layers, of(key_values, hidden, x_users=3)),  # k, v
        (layers, of(hidden, hidden, x_fuses=False)),  # o, of what attention leaves in memory
        (2 * layers, of(inner, hidden, x_users=2)),  # gate, up
        (layers, of(hidden, inner)),  # down
        (1, of(words, hidden)),  # lm_head
    ]


def _transformers(config: dict[str, Any], tokens: int) -> list[tuple[int, Layer]]:
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
    size = SIZES["30m"]
    tokens, hidden = sequences * SEQUENCE, size.hidden
    return llama(tokens, hidden, size.intermediate, size.layers, hidden, VOCABULARY)


def _times(recipe: str, layers: list[tuple[int, Layer]]) -> tuple[float, float, float, float]:
    """Milliseconds of the linears: GPU under the recipe and in BF16, host likewise."""
    of = resolve(recipe)
    own = [(n, s) for n, layer in layers for s in recipe_steps(of, layer, GEMMS)]
    bf16 = [(n, s) for n, layer in layers for s in bf16_steps(layer, GEMMS)]
    gpu = [1e3 * sum(n * s.seconds(H200) for n, s in steps) for steps in (own, bf16)]
    host = [1e3 * sum(n * s.host_seconds for n, s in steps) for steps in (own, bf16)]
    return gpu[0], gpu[1], host[0], host[1]


def linears() -> Iterator[Compared]:
    """Milliseconds of single layers, BF16's too."""
    tokens = MOE_BATCH * MOE_SEQUENCE * CHOSEN
    experts = Layer(tokens, 2 * INNER, WIDTH, EXPERTS, grouped=True, x_fuses=False, emulated=True)
    layers = {"moe_grouped_gemm": experts} | {
        f"linear_4096_{n}": Layer(TOKENS, n, 4096, emulated=True, x_fuses=False)
        for n in (4096, 14336)
    }
    for row in [*rows_of("models.json"), *rows_of("moe.json")]:
        if row["name"] in layers:
            own, bf16, *_ = _times("quartet2", [(1, layers[row["name"]])])
            yield Compared(f"{row['name']}, BF16", bf16, row["bf16"], "ms", STEPS_WITHIN)
            yield Compared(row["name"], own, row["quartet2"], "ms", STEPS_WITHIN)


STEPS = {
    "llama_step": ("quartet2", _transformers(LLAMA, BATCH * LONG)),
    "llama_8b_step": ("quartet2", _transformers(EIGHT_B, 4096)),
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
        measured = row["value"] if "value" in row else row["quartet2"]
        yield Compared(row["name"], row["bf16"] + more, measured, "ms", STEPS_WITHIN)


PER_LINEAR = "host_us_per_linear"


def of_the_host() -> Iterator[Compared]:
    """Microseconds of a linear of a training step, beside BF16's."""
    layer = Layer(128, 128, 128, bias=True, emulated=True)
    for row in rows_of("steps.json"):
        if row["name"] == PER_LINEAR:
            *_, own, bf16 = _times("quartet2", [(1, layer)])
            predicted = row["bf16"] + 1e3 * (own - bf16)
            yield Compared(PER_LINEAR, predicted, row["value"], "us", STEPS_WITHIN)


def missing() -> list[str]:
    """Rows that there are predictions for, and no measurements."""
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


PAGE = """\
# Predicted and measured

Written by `python examples/benchmarks/predicted.py`, from the cost model (`q2compile/cost_model`)
and the rows of `results/` of one H200. Each row says in its file when and with which versions it
was measured. The aims are {kernels:.0%} for kernels and {steps:.0%} for whole steps; a row outside
of them says "missed".

## Kernels

All launches of a call. Five constants were set by these rows: the share of the issue slots that a
quantiser fills, with coins and without, of the bandwidth, what is constant in a launch
(`q2compile/cost_model/devices.py`), and a product of tensor cores (`instructions.py`). The rest is
bytes and instructions counted in machine code.

{kernel_table}

## Layers and steps

Of a linear everything is predicted, BF16's time too: the share of the peak that its GEMM reaches is
set by `linear_4096_4096`, BF16. Of a Llama's step the prediction is BF16's step as measured, and
what its linears take more, on the GPU or on the host, whichever is more; under CUDA graphs on the
GPU. Nothing was set by these rows. Those of 64 x 512 tokens without CUDA graphs were measured
before quantisers were launched together, as they are predicted: a step has some five launches a
linear less now.

In the step of 8 x 512 tokens the host is the limit, and what a linear takes of it is more than the
calls that `host_us_per_call` was measured on: buffers, and what autograd keeps for the backward,
three times as many tensors as in BF16, are not in the model. Of a linear that shares nothing, nor
has anything to be fused with, `host_us_per_linear`, they are the greater part.

{step_table}

## Not measured yet

{missing}
"""


def page() -> str:
    names = ", ".join(f"`{name}`" for name in missing())
    return PAGE.format(
        kernels=KERNELS,
        steps=STEPS_WITHIN,
        kernel_table=table(kernels()),
        step_table=table((*linears(), *steps(), *of_the_host())),
        missing=f"Of what is predicted: {names}." if names else "Nothing of what is predicted.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE_FILE)
    args = parser.parse_args()
    args.out.write_text(page(), encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
