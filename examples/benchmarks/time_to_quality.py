# SPDX-License-Identifier: Apache-2.0
"""The time that a smaller loss costs: a table and a picture of the gap to BF16 against the time of
the linears, for recipes, for layers in BF16 or FP8, and for late switches of the forward.

    python examples/benchmarks/time_to_quality.py [--picture FILE]

Needs no GPU. The gaps are those of the branched runs of the 30M Llama, with lm_head in BF16 unless
a row says otherwise. The times are the cost model's, for the linears of the 8B Llama with 4096
tokens under the same policy, over BF16's: a range, where something is not known. Blocks count by
their share: the last of 6 blocks is a sixth of the 8B's. A switch in mid-training takes the mean of
both, weighted by their steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from predicted import linears_of
from pretraining.gaps import BASELINE, Gap, gaps
from pretraining.page import results
from recipes_picture import BRANCHED, ROWS
from rows import HERE
from workloads import LLAMA_8B, LLAMA_8B_TOKENS

from q2compile.cost_model.devices import DATA_SHEETS, Device
from q2compile.cost_model.prices import bf16_steps, recipe_steps
from q2compile.cost_model.ranges import Range, total
from q2compile.cost_model.step import Step
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve

PICTURE = HERE.parent / "guides" / "pictures" / "time_to_quality.svg"
DEVICES = tuple(device for device in DATA_SHEETS if device.name in ("B200", "RTX 5090"))
PROJECTIONS = ("q", "kv", "o", "gate_up", "down", "lm_head")  # the order of `predicted.llama`
ALL = frozenset(PROJECTIONS[:-1])
FORWARD = {"base": "quartet2", "fprop": "bf16"}  # quartet2's backward, a forward in BF16
Recipe = str | Mapping[str, str]
LINE = 0.0009  # nats: two names that are nearer would cover each other


@dataclass(frozen=True)
class Variant:
    """A policy. ``others`` replaces the recipe of ``layers`` in a ``share`` of blocks, or steps."""

    what: str
    recipe: Recipe = "quartet2"
    others: Recipe = "bf16"
    layers: frozenset[str] = frozenset()
    share: float = 1.0
    lm_head: Recipe = field(default="bf16", kw_only=True)

    def recipes(self, projection: str) -> list[tuple[float, Recipe]]:
        """Each recipe of a projection, with its share of the time."""
        if projection == "lm_head":
            return [(1.0, self.lm_head)]
        if projection not in self.layers:
            return [(1.0, self.recipe)]
        return [(1 - self.share, self.recipe), (self.share, self.others)]


def _late(what: str, others: Recipe, share: float) -> Variant:
    """Others in the last steps, or blocks."""
    return Variant(what, "quartet2", others, ALL, share)


# Run -> its policy. The text is empty where the name says all.
VARIANTS = {
    BASELINE: Variant("", "bf16"),
    "fp8": Variant("", "fp8"),
    "quartet2_fp8": Variant("", "quartet2_fp8"),
    "quartet2-late-36": _late("forward in BF16, last 36% of the steps", FORWARD, 0.36),
    "quartet2-late": _late("forward in BF16, last 18%", FORWARD, 0.18),
    "quartet2-late-9": _late("forward in BF16, last 9%", FORWARD, 0.09),
    "quartet2-late-fp8": _late("forward in FP8, last 18%", "quartet2_fp8", 0.18),
    "quartet2-late-fp8-9": _late("forward in FP8, last 9%", "quartet2_fp8", 0.09),
    "quartet2-last-2": _late("last 2 of 6 blocks in BF16", "bf16", 2 / 6),
    "quartet2-last-2-fp8": _late("last 2 of 6 blocks in FP8", "fp8", 2 / 6),
    "quartet2-qkv-bf16": Variant("q, k and v in BF16", layers=frozenset({"q", "kv"})),
    "quartet2-down-bf16": Variant("down in BF16", layers=frozenset({"down"})),
    "quartet2-last-1-fp8": _late("last block in FP8", "fp8", 1 / 6),
    "quartet2-o-bf16": Variant("o in BF16", layers=frozenset({"o"})),
    "quartet2-o-fp8": Variant("o in FP8", "quartet2", "fp8", frozenset({"o"})),
    "quartet2-search": Variant("recipe `quartet2_search`", "quartet2_search"),
    "quartet2": Variant(""),
    "quartet2-head-fp8": Variant("lm_head in FP8", lm_head="fp8"),
    "mxfp4": Variant("", "mxfp4"),
    "nvfp4": Variant("", "nvfp4"),
    "tetrajet2": Variant("", "tetrajet2"),
    "quartet": Variant("", "quartet"),
    "mxfp4_2d": Variant("", "mxfp4_2d"),
}


def loss_gaps() -> dict[str, Gap | None]:
    """Nats per token above BF16, by run, the smallest first; None for BF16."""
    runs = results(json.loads(ROWS.read_text(encoding="utf-8")))[BRANCHED]
    found = gaps(runs, [(run, BASELINE) for run in VARIANTS if run != BASELINE])
    of_run = {run: gap for (run, _), gap in found.items()}
    return {BASELINE: None} | {
        run: of_run[run] for run in sorted(of_run, key=lambda run: of_run[run].mean)
    }


def time(variant: Variant, device: Device) -> Range:
    """The linears' time over BF16's, forward and backward."""
    own = bf16 = Range(0.0, 0.0)
    linears = linears_of(LLAMA_8B, LLAMA_8B_TOKENS)
    for projection, (count, layer) in zip(PROJECTIONS, linears, strict=True):
        layer = replace(layer, capability=device.capability)
        plain = bf16_steps(layer, GEMMS)
        bf16 += count * seconds(plain, device)
        for share, recipe in variant.recipes(projection):
            steps = plain if recipe == "bf16" else recipe_steps(resolve(recipe), layer, GEMMS)
            own += count * share * seconds(steps, device)
    return own / bf16


def seconds(steps: Iterable[Step], device: Device) -> Range:
    return total(step.seconds(device) for step in steps)


def table() -> list[str]:
    """As Markdown: the table of examples/guides/measured.md."""
    lines = ["| run | what | gap | " + " | ".join(d.name for d in DEVICES) + " |"]
    lines.append("|---" * (3 + len(DEVICES)) + "|")
    for run, gap in loss_gaps().items():
        variant = VARIANTS[run]
        times = (time(variant, device).text() for device in DEVICES)
        lines.append(f"| `{run}` | {variant.what} | {gap or '0'} | {' | '.join(times)} |")
    return lines


def best(times: Mapping[str, float], losses: Mapping[str, float]) -> list[str]:
    """The runs than which none is both faster and better, the fastest first."""
    chosen: list[str] = []
    for run in sorted(times, key=lambda run: (times[run], losses[run])):
        if not chosen or losses[run] < losses[chosen[-1]]:
            chosen.append(run)
    return chosen


def draw(file: Path) -> None:
    """A panel for each GPU; the runs that no other beats in both are blue, with their names where
    there is room."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "q2compile", "svg.fonttype": "none", "font.size": 9}
    )
    from matplotlib import pyplot

    losses = {run: 0.0 if gap is None else gap.mean for run, gap in loss_gaps().items()}
    figure, panels = pyplot.subplots(1, len(DEVICES), figsize=(9, 4), sharey=True)
    for axes, device in zip(panels, DEVICES, strict=True):
        ranges = {run: time(VARIANTS[run], device) for run in losses}
        front = best({run: each.middle for run, each in ranges.items()}, losses)
        for run, each in ranges.items():
            color = "tab:blue" if run in front else "silver"
            axes.plot([each.low, each.high], [losses[run]] * 2, "o-", color=color, markersize=4)
        named = -LINE
        for run in reversed(front):
            if losses[run] - named >= LINE:
                named = losses[run]
                axes.annotate(run, (ranges[run].high, named), (5, 3), textcoords="offset points")
        axes.set(xlabel=f"time of an 8B's linears on a {device.name} over BF16's, predicted")
        axes.set_xlim(right=1.12)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="loss above BF16, nats per token, measured")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=PICTURE)
    draw(parser.parse_args().picture)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
