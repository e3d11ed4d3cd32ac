# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture: each recipe beside BF16, in time, saved memory and loss.

    python examples/benchmarks/recipes_picture.py [--out FILE]

Needs no GPU. The three columns are

    time     of all linears of a Llama of 8B parameters with 4096 tokens, forward and backward, on
             a B200, over BF16's: predicted by the cost model, as in PREDICTED.md
    memory   bits per element that a linear saves for the backward, as `q2compile.explain` reports
    loss     gap to BF16 of a Llama of 30M parameters: measured, from the branched runs in
             examples/pretraining/results/branched.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from predicted import linears_of
from pretraining.gaps import BASELINE, Gap, gaps
from pretraining.page import results
from rows import HERE
from torch import nn
from workloads import LLAMA_8B, LLAMA_8B_TOKENS

import q2compile
from q2compile.cost_model.devices import B200
from q2compile.cost_model.prices import bf16_steps, recipe_steps
from q2compile.cost_model.ranges import Range, total
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve

PICTURE = HERE.parent / "guides" / "pictures" / "recipes.svg"
ROWS = HERE.parent / "pretraining" / "results" / "branched.json"
BRANCHED = ("30m", 39321600, 500)  # size, tokens, step of the branch: the runs with most recipes
OTHER_RUNS = {"quartet2_search": "quartet2-search"}  # recipe -> its run, where the names differ
DEFAULT = "quartet2"

# In units of the drawing. The README shows it up to this wide; a phone halves it.
WIDTH, TOP, LINE, BAR, MARGIN = 566, 56, 29, 18, 10
NAMES = 134  # width of the column of names
COLUMN, ROOM = 144, 90  # of a column, and the part of it that is the text beside the longest bar


@dataclass(frozen=True)
class Column:
    """title, below: the two lines at the top. most: the value of the longest bar. text: how a value
    is written."""

    title: str
    below: str
    values: Mapping[str, float | Range]
    most: float
    text: Callable[[Any], str]


def times() -> dict[str, Range]:
    """Predicted time of the linears of the 8B Llama on a B200, over BF16's."""
    capability = B200.capability
    linears = linears_of(LLAMA_8B, LLAMA_8B_TOKENS)
    layers = [(n, replace(own, capability=capability)) for n, own in linears]
    bf16 = total(n * s.seconds(B200) for n, own in layers for s in bf16_steps(own, GEMMS))
    return {
        name: total(
            n * s.seconds(B200)
            for n, own in layers
            for s in recipe_steps(resolve(name), own, GEMMS)
        )
        / bf16
        for name in RECIPES
    }


def saved_bits() -> dict[str, float]:
    """Bits per element that a linear saves for the backward; nothing is computed."""
    found = {}
    for name in RECIPES:
        torch.compiler.reset()  # Dynamo keeps eight versions of one function
        with torch.device("meta"):
            linear = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
            x = torch.empty(4096, 4096, dtype=torch.bfloat16)
        options = {"recipe": name, "inner": "eager"}
        (row,) = q2compile.explain(linear, x, options=options).rows
        codes, elements = row.saved_bytes, row.saved_elements
        found[name] = 8 * codes / elements if codes and elements else 16.0
    return found


def loss_gaps() -> dict[str, Gap]:
    """Measured gaps to BF16, in nats per token, of the recipes that were trained with."""
    runs = results(json.loads(ROWS.read_text(encoding="utf-8")))[BRANCHED]
    names = {OTHER_RUNS.get(name, name): name for name in RECIPES if name != BASELINE}
    found = gaps(runs, [(run, BASELINE) for run in names])
    return {names[run]: gap for (run, _), gap in found.items()}


def columns() -> list[Column]:
    losses = {BASELINE: 0.0, **{name: gap.mean for name, gap in loss_gaps().items()}}
    most = max(losses.values())
    return [
        Column("time of an 8B", "B200, predicted", times(), 1.0, Range.text),
        Column("saved memory", "bits per element", saved_bits(), 16.0, "{:.3g}".format),
        Column(
            "loss over BF16", "nats, measured", losses, most, lambda n: f"+{n:.3f}" if n else "0"
        ),
    ]


def lines(drawn: list[Column]) -> Iterator[str]:
    for i, column in enumerate(drawn):
        x = NAMES + i * COLUMN
        yield f'<text class="strong" x="{x}" y="20">{column.title}</text>'
        yield f'<text class="soft" x="{x}" y="39">{column.below}</text>'
    names = sorted(RECIPES, key=lambda name: name != BASELINE)  # BF16 first, then as in the table
    for number, name in enumerate(names):
        y = TOP + number * LINE
        kind = "base" if name == BASELINE else "default" if name == DEFAULT else "other"
        strong = " strong" if kind == "default" else ""
        yield f'<text class="name{strong}" x="0" y="{y + 15}">{name}</text>'
        for i, column in enumerate(drawn):
            x, value = NAMES + i * COLUMN, column.values.get(name)
            if value is None:
                yield f'<text class="soft" x="{x}" y="{y + 15}">not measured</text>'
                continue
            middle = value.middle if isinstance(value, Range) else value
            width = round((COLUMN - ROOM) * middle / column.most, 1)
            yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
            place = round(x + width + (6 if width else 0), 1)
            text = column.text(value)
            yield f'<text class="number{strong}" x="{place}" y="{y + 15}">{text}</text>'


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-labelledby="title">
  <title id="title">Each recipe beside BF16: time, saved memory, loss</title>
  <style>
    svg {{ --page: #ffffff; --ink: #1f2328; --soft: #59636e; --base: #9aa5b1; --other: #7fa8dc; \
--default: #b26a00; }}
    @media (prefers-color-scheme: dark) {{
      svg {{ --page: #0d1117; --ink: #e6edf3; --soft: #9aa5b1; --base: #6b7682; --other: #3b6ca8; \
--default: #e0a040; }}
    }}
    text {{ font: 16px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; \
fill: var(--ink); }}
    .page {{ fill: var(--page); }}
    .name {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: 14px; }}
    .strong {{ font-weight: 700; }}
    .soft {{ fill: var(--soft); font-size: 15px; }}
    .base {{ fill: var(--base); }}
    .other {{ fill: var(--other); }}
    .default {{ fill: var(--default); }}
  </style>
  <rect class="page" width="{width}" height="{height}" rx="6"/>
  <g transform="translate({margin} {margin})">
  {lines}
  </g>
</svg>
"""


def svg() -> str:
    body = "\n  ".join(lines(columns()))
    height = TOP + LINE * len(RECIPES) + MARGIN
    return SVG.format(width=WIDTH + 2 * MARGIN, height=height, margin=MARGIN, lines=body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    out = parser.parse_args().out
    out.write_text(svg(), encoding="utf-8")
    print(f"{out} written")


if __name__ == "__main__":
    main()
