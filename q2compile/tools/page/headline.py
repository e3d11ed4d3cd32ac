# SPDX-License-Identifier: Apache-2.0
"""The page's first sentence: what was taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from q2compile.report.model_rows import layers, of_model


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sentence of a run with a dump."""
    weights = [row for row in of_model(rows) if row["has_parameter"]]
    return _taken(layers(weights), layers(row for row in weights if row["taken"]))


def of_records(telemetry: Mapping[str, Any]) -> str:
    """The sentence about what was recorded, for a run without a dump."""
    steps, modules = telemetry["steps"], {o["module"] for o in telemetry["operands"]}
    if not steps:
        return "Nothing is recorded here yet."
    ranks = len(telemetry["ranks"])
    of_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    plural = "" if len(modules) == 1 else "s"
    return f"{len(modules)} module{plural}, {which}{of_ranks}."


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
