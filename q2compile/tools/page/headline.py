# SPDX-License-Identifier: Apache-2.0
"""The page's first sentences: what was taken, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from q2compile.cost_model.devices import shown_devices
from q2compile.report.model_rows import layers, of_model
from q2compile.tools.time_words import time_words


def headline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences, the most important first."""
    rows = of_model(rows)
    weights = [row for row in rows if row["has_parameter"]]
    taken = [row for row in weights if row["taken"]]
    return [_taken(layers(weights), layers(taken)), *_times(taken)]


def of_records(telemetry: Mapping[str, Any]) -> list[str]:
    """One sentence about what was recorded, for a run without a dump."""
    steps, modules = telemetry["steps"], {o["module"] for o in telemetry["operands"]}
    if not steps:
        return ["Nothing is recorded here yet."]
    ranks = len(telemetry["ranks"])
    of_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    plural = "" if len(modules) == 1 else "s"
    return [f"{len(modules)} module{plural}, {which}{of_ranks}."]


def _taken(weights: Sequence[Mapping[str, Any]], taken: Sequence[Mapping[str, Any]]) -> str:
    if not weights:
        return "No matmul with a weight was seen."
    if not taken:
        return f"None of the {len(weights)} matmuls with a weight was taken."
    by_recipe: dict[str, list[Mapping[str, Any]]] = {}
    for row in taken:
        by_recipe.setdefault(row["recipe"], []).append(row)
    if len(by_recipe) == 1:
        how = f"{_formats(taken)} ({taken[0]['recipe']})"
    else:
        counts = ", ".join(f"{len(of)} by {name}" for name, of in by_recipe.items())
        how = f"{_formats(taken)} ({counts})"
    of = f"All {len(weights)}" if len(taken) == len(weights) else f"{len(taken)} of {len(weights)}"
    plural = "matmul" if len(weights) == 1 else "matmuls"
    runs = "runs" if len(taken) == len(weights) == 1 else "run"
    return f"{of} {plural} with a weight {runs} in {how}."


def _formats(taken: Iterable[Mapping[str, Any]]) -> str:
    text = " ".join(str(row[gemm]) for row in taken for gemm in ("fprop", "dgrad", "wgrad"))
    found = [name for name in ("fp8", "nvfp4", "mxfp4") if name in text]
    return " and ".join(name.upper() for name in found) or "low precision"


def _times(taken: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = []
    if ratios := predicted_ratios(taken):
        each = ", ".join(f"on {name} {time_words(ratio)}" for name, ratio in ratios.items())
        of = "counting only the GEMMs and quantizers of these matmuls"
        sentences.append(f"Predicted from data sheets, {of}: {each}.")
    measured = [row["measured"] for row in taken if row["measured"]]
    for device in dict.fromkeys(times["device"] for times in measured):
        own, bf16 = (
            sum(times[key] for times in measured if times["device"] == device)
            for key in ("microseconds", "bf16_microseconds")
        )
        sentences.append(f"Measured on {device}, one by one: {time_words(own / bf16)}.")
    if ratios and not measured:
        sentences.append("To measure them on this machine, run q2compile report --measure.")
    return sentences


def predicted_ratios(taken: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """GPU -> time of the matmuls that were taken over BF16's; {} without predictions."""
    predicted = [row["predicted"] for row in taken if row["predicted"]]
    if not predicted:
        return {}
    return {
        device.name: sum(times[device.column]["microseconds"] for times in predicted)
        / sum(times[device.column]["bf16_microseconds"] for times in predicted)
        for device in shown_devices(predicted)
    }
