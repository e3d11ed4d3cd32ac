# SPDX-License-Identifier: Apache-2.0
"""The data of the report page, and the page.

The page's data is a JSON document, in the element with the id "data":

    format     1
    name       of the run's folder, or "explain"
    headline   sentences (`headline`)
    findings   [{"text", "policy", "about"}, ...] (`findings`)
    devices    [{"column": "b200", "name": "B200"}, ...], of the predictions
    assumptions  what the predictions stand on
    recipes    [{"name", "fprop", "dgrad", "wgrad"}, ...]: each distinct one that was used
    kernels    [{"kernels": {...}, "calls": {...}}, ...]: each distinct one
    rows       report.json's, where recipe is a place in recipes for a row that was taken and null
               for others, kernels one in kernels, and fprop, dgrad, wgrad and calls are left out;
               and beside them error (`errors.Error`, the worst of the matmul's operands, or of its
               GEMMs by the comparison) and share (of the gradient's squared error), null where they
               are not known; and layer and counts (`model_rows.rows_of_layers`)
    notes      sentences
    graphs     [{"number", "texts": {"0_dynamo.txt": place in texts, ...}, "passes": [...],
               "saved": place in texts or null}, ...]: passes is passes.json, saved what
               `saved_tensors` found, as JSON
    texts      base64 of zlib; equal texts once
    telemetry  as `telemetry.read.read_folder` gives it, or null
    run        as a dump's run.json has it, {} where that is not known
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from q2compile.cost_model.devices import ASSUMPTIONS, shown_devices
from q2compile.recipes.recipe import GEMMS
from q2compile.report.model_rows import rows_of_layers
from q2compile.tools.page.assemble import assemble, packed, static
from q2compile.tools.page.errors import (
    Error,
    gemm_errors,
    operand_errors,
    shares,
    worst_by_module,
)
from q2compile.tools.page.findings import findings
from q2compile.tools.page.foot import foot
from q2compile.tools.page.headline import headline, of_records
from q2compile.tools.page.saved_tensors import saved_tensors

_SCRIPTS = (
    "model.js",
    "gemm.js",
    "summary.js",
    "tree.js",
    "details.js",
    "matmuls.js",
    "curve.js",
    "operands.js",
    "diff.js",
    "graphs.js",
    "memory.js",
    "report.js",
)
# Files of a graph that the page shows as they are, or reads.
_TEXTS = (".txt", ".py")
_ORIGINS = "nodes.json"


def report_page(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    graphs: Mapping[int, Mapping[str, str]],
    *,
    telemetry: Mapping[str, Any] | None = None,
    comparison: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> str:
    """The page of a report.

    rows        as `Row.to_json` gives them
    graphs      number -> name of a dump file -> its text
    telemetry   as `telemetry.read.read_folder` gives it
    comparison  as `Comparison.to_json` gives it
    run         as `RunFacts.to_json` gives it
    """
    data = document(name, rows, notes, graphs, telemetry=telemetry, comparison=comparison, run=run)
    headline = data["headline"]
    parts = {
        "name": escape(name),
        "headline": escape(headline[0]),
        "more": escape(" ".join(headline[1:])),
        "foot": foot(data["run"]),
    }
    body = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], static("report.html"))
    scripts = [static(f) for f in _SCRIPTS]
    return assemble(f"{name}: {headline[0]}", [static("report.css")], scripts, body, data)


def document(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    graphs: Mapping[int, Mapping[str, str]],
    *,
    telemetry: Mapping[str, Any] | None = None,
    comparison: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The data of the page (see above)."""
    recipes, kernels, texts = _Places(), _Places(), _Places()
    operands = operand_errors(telemetry)
    worst = worst_by_module(operands or gemm_errors(comparison, rows))
    share = shares(comparison)
    layers = rows_of_layers(rows)
    devices = shown_devices(row["predicted"] for row in rows)
    shown = [_row(row, recipes, kernels, worst, share) for row in layers]
    given = [options.get("policy") or {} for options in (run or {}).get("options", ())]
    if not given and comparison:
        given = [comparison.get("policy") or {}]
    in_force = [policy for i, policy in enumerate(given) if policy not in given[:i]]
    return {
        "format": 1,
        "name": name,
        "headline": headline(rows) if rows or telemetry is None else of_records(telemetry),
        "findings": findings(rows, telemetry, comparison, operands, in_force),
        "devices": [{"column": d.column, "name": d.name} for d in devices],
        "assumptions": ASSUMPTIONS,
        "recipes": [json.loads(text) for text in recipes.values],
        "kernels": [json.loads(text) for text in kernels.values],
        "rows": shown,
        # The headline and the bars say what the predictions are; `assumptions` what they stand on.
        "notes": [note for note in notes if not note.startswith("predicted")],
        "graphs": [_graph(number, files, texts) for number, files in sorted(graphs.items())],
        "texts": [packed(text) for text in texts.values],
        "telemetry": telemetry,
        "run": run or {},
    }


class _Places:
    """Distinct texts, and where each stands."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def of(self, text: str) -> int:
        return self._place.setdefault(text, len(self._place))

    @property
    def values(self) -> list[str]:
        return list(self._place)


def _row(
    row: Mapping[str, Any],
    recipes: _Places,
    kernels: _Places,
    worst: Mapping[str, Error],
    share: Mapping[str, float],
) -> dict[str, Any]:
    left_out = (*GEMMS, "kernels", "calls", "seed_index", "wanted", "served", "model")
    shown = {key: value for key, value in row.items() if key not in left_out}
    named = {"name": row["recipe"], **{gemm: row[gemm] for gemm in GEMMS}}
    run = {key: row[key] for key in ("kernels", "calls")}
    known = row["taken"] and row["counts"]
    error = worst.get(row["module"]) if known else None
    shown["error"] = error and error.to_json()
    shown["share"] = share.get(row["module"]) if known else None
    shown["recipe"] = recipes.of(json.dumps(named)) if row["taken"] else None
    shown["kernels"] = kernels.of(json.dumps(run)) if row["taken"] else None
    return shown


def _graph(number: int, files: Mapping[str, str], texts: _Places) -> dict[str, Any]:
    saved = saved_tensors(files)
    return {
        "number": number,
        "texts": {
            name: texts.of(text)
            for name, text in sorted(files.items())
            if name.endswith(_TEXTS) or name == _ORIGINS
        },
        "passes": json.loads(files.get("passes.json", "[]")),
        "saved": None if saved is None else texts.of(json.dumps(saved)),
    }
