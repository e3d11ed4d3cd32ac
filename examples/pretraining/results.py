# SPDX-License-Identifier: Apache-2.0
"""One table and the curves of a folder of runs, rewritten whenever another run has finished."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretraining.gaps import BASELINE, Gap, by_name, gaps
from pretraining.record import Losses, Result, replaced

SMOOTHING = 0.98  # of the gap's and the norm's curves: an average over about 50 steps


@dataclass(frozen=True)
class Finished:
    """A run that ended, with its curve."""

    result: Result
    losses: Losses


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-seed{seed}"


def finished(folder: Path) -> list[Finished]:
    """The runs of a folder that ended: bf16 first, then as they ended."""
    files = sorted(folder.glob("*/result.json"), key=lambda file: file.stat().st_mtime_ns)
    runs = [Finished(Result.read(f), Losses.read(f.parent / "losses.csv")) for f in files]
    return sorted(runs, key=lambda run: run.result.name != BASELINE)


def curves(runs: Sequence[Finished]) -> dict[str, list[Losses]]:
    """name -> the curves of its seeds."""
    named: dict[str, list[Losses]] = {}
    for run in runs:
        named.setdefault(run.result.name, []).append(run.losses)
    return named


def write(runs: Sequence[Finished], folder: Path, title: str) -> str:
    """Write table.txt and the pictures; returns the table. The first run is the baseline."""
    text = table([run.result for run in runs])
    with replaced(folder / "table.txt") as file:
        file.write_text(text + "\n", encoding="utf-8")
    for name, draw in PICTURES.items():
        picture(draw, runs, title, folder / f"{name}.png")
    return text


def picture(
    draw: Callable[[Axes, Any], None], drawn: Any, title: str, file: Path, height: float = 5.0
) -> None:
    """Save what a function draws of ``drawn`` on axes. height: inches."""
    figure = Figure(figsize=(8, height), layout="constrained")
    draw(figure.subplots(), drawn)
    figure.suptitle(title)
    figure.axes[0].grid(alpha=0.3)
    if figure.axes[0].get_legend_handles_labels()[0]:
        # Beside the axes: twenty runs would cover the curves.
        figure.legend(loc="outside right upper", fontsize="small")
    with replaced(file) as unfinished:
        figure.savefig(unfinished, dpi=150, format="png")


# ------------------------------------------------------------------------------------------- table


def table(results: Sequence[Result]) -> str:
    """One line per run; gaps, by seed, and ratios are to the first one. On a CPU there is no ratio
    of times, since the runs follow each other and whatever else the machine does decides it."""
    named = by_name(results)
    first = next(iter(named))
    found = gaps(results, [(name, first) for name in named])
    width = max(12, *(len(name) + 2 for name in named))
    header = f"{'recipe':<{width}}{'seeds':>6}{'val loss':>10}{'gap':>25}{'s/step':>10}{'ratio':>8}"
    lines = [header + f"{'tokens/s':>11}{'peak GiB':>10}{'first step, s':>15}"]
    on_cpu = any(str(r.setup.get("device")).startswith("cpu") for r in results)
    step = median(named[first], "step_seconds")
    for name, runs in named.items():
        gap = found.get((name, first))
        diverged = [f"seed {r.seed}: NaN at step {r.diverged_at}" for r in runs if r.diverged_at]
        shown = "; ".join([*([str(gap)] if gap and name != first else []), *diverged])
        lines.append(
            f"{name:<{width}}{len(runs):>6}{mean(r.val_loss for r in runs):>10.4f}"
            f"{shown:>25}{median(runs, 'step_seconds'):>10.4f}"
            f"{'-' if on_cpu else format(median(runs, 'step_seconds') / step, '.2f'):>8}"
            f"{median(runs, 'tokens_per_second'):>11,.0f}"
            f"{median(runs, 'peak_bytes') / 2**30:>10.2f}"
            f"{max(r.first_step_seconds for r in runs):>15.1f}"
        )
    what = "gap" if on_cpu else "gap and ratio"
    lines.append(f"({what}: to {first}, gaps paired by seed; the first step compiles)")
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def median(results: Iterable[Result], field: str) -> float:
    return statistics.median(getattr(result, field) for result in results)


# ------------------------------------------------------------------------------------------ curves


# As many as the table has runs: matplotlib's ten, then their light ones.
COLORS = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def across(curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(mean, standard deviation) over the seeds at every step that all of them have."""
    return [
        (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
        for values in zip(*curves, strict=False)
    ]


def banded(axes: Axes, x: Sequence[float], curves: Sequence[Sequence[float]], **style: Any) -> None:
    """The mean over the seeds, and a band of one standard deviation around it."""
    points = across(curves)
    middle = [m for m, _ in points]
    (line,) = axes.plot(x[: len(middle)], middle, **style)
    if len(curves) > 1:
        low, high = [m - s for m, s in points], [m + s for m, s in points]
        axes.fill_between(
            x[: len(middle)], low, high, color=line.get_color(), alpha=0.2, linewidth=0
        )


def draw_losses(axes: Axes, runs: Sequence[Finished]) -> None:
    """Training losses, smoothed and faint as they are, and the validation losses as dots."""
    for index, (name, seeds) in enumerate(curves(runs).items()):
        color = COLORS[index % len(COLORS)]
        steps, losses = seeds[0].of("train")
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
        smooth = [smoothed(run.of("train")[1]) for run in seeds]
        banded(axes, steps, smooth, color=color, label=name)
        steps = seeds[0].of("val")[0]
        validation = [run.of("val")[1] for run in seeds]
        banded(axes, steps, validation, marker="o", ls="--", color=color)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.set_title("line: training, smoothed; dots: validation", fontsize="small")


def draw_gaps(axes: Axes, runs: Sequence[Finished]) -> None:
    """Differences to the first run over tokens: training, smoothed, and validation as dots."""
    by_seed: dict[str, dict[int, Losses]] = {}
    for run in runs:
        by_seed.setdefault(run.result.name, {})[run.result.seed] = run.losses
    base = by_seed[next(iter(by_seed))]
    setup = runs[0].result.setup
    tokens = setup["batch"] * setup["seq"] / 1e6
    limits = []
    for index, (name, seeds) in enumerate(list(by_seed.items())[1:], start=1):
        both = [seed for seed in seeds if seed in base]
        for split, style in (("train", {"alpha": 0.6}), ("val", {"marker": "o", "ls": "--"})):
            differences = [difference(seeds[s].of(split)[1], base[s].of(split)[1]) for s in both]
            if not differences:
                continue
            if split == "train":
                differences = [smoothed(curve, SMOOTHING) for curve in differences]
            x = [step * tokens for step in seeds[both[0]].of(split)[0]]
            label = name if split == "train" else None
            banded(axes, x, differences, color=COLORS[index % len(COLORS)], label=label, **style)
            limits += [abs(v) for c in differences for v in c[len(c) // 3 :] if math.isfinite(v)]
    axes.axhline(0, color=COLORS[0], linewidth=1)
    axes.set_title("line: training, smoothed; dots: validation", fontsize="small")
    if limits:
        axes.set_ylim(-0.5 * max(limits), 1.5 * max(limits))  # the start would hide the rest
    axes.set(xlabel="million tokens", ylabel=f"loss above {next(iter(by_seed))}, nats per token")


def draw_errors(axes: Axes, found: Sequence[Gap]) -> None:
    """A line for each gap, the largest at the top, with two standard errors to each side."""
    ordered = sorted(found, key=lambda gap: gap.mean)
    for place, gap in enumerate(ordered):
        reach = 2 * gap.error if gap.error is not None else 0.0
        axes.errorbar(gap.mean, place, xerr=reach, fmt="o", ms=4, capsize=3, color=COLORS[0])
    labels = [f"{gap.run} ({gap.seeds})" for gap in ordered]
    axes.set_yticks(range(len(ordered)), labels, fontsize="small")
    axes.axvline(0, color="black", linewidth=1)
    axes.set(xlabel=f"loss above {ordered[0].against}, nats per token, ± 2 standard errors")
    axes.set_title("in parentheses: seeds", fontsize="small")


def difference(run: Sequence[float], against: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(run, against, strict=False)]


def draw_norms(axes: Axes, runs: Sequence[Finished]) -> None:
    """Norms of the gradient before clipping, smoothed."""
    for index, (name, seeds) in enumerate(curves(runs).items()):
        steps = seeds[0].of("train")[0]
        norms = [
            smoothed([p.grad_norm for p in run.points if p.split == "train"], SMOOTHING)
            for run in seeds
        ]
        banded(axes, steps, norms, color=COLORS[index % len(COLORS)], label=name)
    axes.set(xlabel="step", ylabel="norm of the gradient, before clipping", yscale="log")


PICTURES: dict[str, Callable[[Axes, Sequence[Finished]], None]] = {
    "losses": draw_losses,
    "gaps": draw_gaps,
    "norms": draw_norms,
}
