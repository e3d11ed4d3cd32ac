# SPDX-License-Identifier: Apache-2.0
"""The data of the report page, and the page.

The page is one HTML file, and opening it loads nothing else. Its data is a JSON document, packed
(`packed`) in the element with the id "data":

    name       of the run's folder, or "explain"
    headline   a sentence (`headline`)
    findings   [{"text", "policy", "about"}, ...] (`findings`)
    devices    [{"column": "b200", "name": "B200"}, ...], of the predictions
    assumptions  what the predictions stand on
    times      the tiles of times (`times.time_tiles`)
    recipes    [{"name", "fprop", "dgrad", "wgrad"}, ...]: each distinct one that was used
    rows       report.json's, where recipe is a place in recipes for a row that was taken and null
               for others; predicted and measured are as `times.beside_bf16` gives them; and beside
               them error (`errors.Error`, the worst of the matmul's operands, or of its GEMMs by
               the comparison) and share (of the gradient's squared error), null where they are not
               known; and layer and counts (`model_rows.rows_of_layers`)
    notes      sentences
    graphs     [{"number", "texts": {"0_dynamo.txt": its text, ...}, "passes", "saved"}, ...]:
               passes is passes.json, with each time in words; saved nodes.json's
    telemetry  as `telemetry.read.read_folder` gives it, or null
    run        as a dump's run.json has it, {} where that is not known
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from q2compile.cost_model.devices import ASSUMPTIONS, Device, shown_devices
from q2compile.cost_model.ranges import Range
from q2compile.recipes.recipe import GEMMS
from q2compile.report.model_rows import rows_of_layers
from q2compile.tools.page.errors import (
    Error,
    gemm_errors,
    operand_errors,
    shares,
    worst_by_module,
)
from q2compile.tools.page.findings import findings
from q2compile.tools.page.headline import headline, of_records
from q2compile.tools.page.times import beside_bf16, time_tiles
from q2compile.tools.time_words import seconds_text

_STYLES = ("base.css", "report.css")
_SCRIPTS = (
    "base.js",
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
_FACTS = ("versions", "commit", "device", "date", "command", "options")


def report_page(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    graphs: Mapping[int, Mapping[str, str]],
    **parts: Mapping[str, Any] | None,
) -> str:
    """The page of a report: `document` in a template, and the scripts that show it. The page's own
    policy lets it run these scripts only, which share one scope."""
    data = document(name, rows, notes, graphs, **parts)
    script = f'(() => {{\n"use strict";\n{"".join(map(_static, _SCRIPTS))}}})();\n'
    inserted = {
        "title": escape(f"{name}: {data['headline']}"),
        "script-hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": "".join(map(_static, _STYLES)),
        "name": escape(name),
        "headline": escape(data["headline"]),
        "foot": _foot(data["run"]),
        "data": packed(json.dumps(data)),
        "script": script,
    }
    template = _static("report.html")
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: inserted[found[1]], template)


def _static(name: str) -> str:
    return (files("q2compile.tools.page") / "static" / name).read_text(encoding="utf-8")


def packed(text: str) -> str:
    """A long text as base64 of zlib's format, which browsers unpack (DecompressionStream)."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _foot(run: Mapping[str, Any]) -> str:
    """Facts about the run, as HTML; "" if none are known."""
    facts = [(fact, _fact_text(run[fact])) for fact in _FACTS if run.get(fact)]
    pairs = "".join(f"<dt>{fact}</dt><dd>{escape(text)}</dd>" for fact, text in facts)
    return f'<footer id="run"><dl class="facts">{pairs}</dl></footer>' if facts else ""


def _fact_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        return "; ".join(json.dumps(options, ensure_ascii=False) for options in value)
    return str(value)


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
    """The data of the page (see above).

    rows        as `Row.to_json` gives them
    graphs      number -> name of a dump file -> its text
    telemetry   as `telemetry.read.read_folder` gives it
    comparison  as `Comparison.to_json` gives it
    run         as `RunFacts.to_json` gives it
    """
    recipes: list[dict[str, str]] = []
    operands = operand_errors(telemetry)
    worst = worst_by_module(operands or gemm_errors(comparison, rows))
    share = shares(comparison)
    layers = rows_of_layers(rows)
    devices = shown_devices(row["predicted"] for row in rows)
    shown = [_row(row, recipes, devices, worst, share) for row in layers]
    given = [options.get("policy") or {} for options in (run or {}).get("options", ())]
    if not given and comparison:
        given = [comparison.get("policy") or {}]
    in_force = [policy for i, policy in enumerate(given) if policy not in given[:i]]
    return {
        "name": name,
        "headline": headline(rows) if rows or telemetry is None else of_records(telemetry),
        "findings": findings(rows, telemetry, comparison, operands, in_force),
        "devices": [{"column": d.column, "name": d.name} for d in devices],
        "assumptions": ASSUMPTIONS,
        "times": time_tiles([row for row in layers if row["counts"]], devices),
        "recipes": recipes,
        "rows": shown,
        # The headline and the bars say what the predictions are; `assumptions` what they stand on.
        "notes": [note for note in notes if not note.startswith("predicted")],
        "graphs": [_graph(number, files) for number, files in sorted(graphs.items())],
        "telemetry": telemetry,
        "run": run or {},
    }


def _row(
    row: Mapping[str, Any],
    recipes: list[dict[str, str]],
    devices: Sequence[Device],
    worst: Mapping[str, Error],
    share: Mapping[str, float],
) -> dict[str, Any]:
    recipe = {"name": row["recipe"], **{gemm: row[gemm] for gemm in GEMMS}}
    if row["taken"] and recipe not in recipes:
        recipes.append(recipe)
    known = row["taken"] and row["counts"]
    error = worst.get(row["module"]) if known else None
    times, measured = row["predicted"], row["measured"]
    return {
        **row,
        "recipe": recipes.index(recipe) if row["taken"] else None,
        "predicted": {
            d.column: beside_bf16([times[d.column]]) for d in devices if d.column in times
        },
        "measured": measured and {"device": measured["device"], **beside_bf16([measured])},
        "error": error and error.to_json(),
        "share": share.get(row["module"]) if known else None,
    }


def _graph(number: int, files: Mapping[str, str]) -> dict[str, Any]:
    passes = json.loads(files.get("passes.json", "[]"))
    shown = (name for name in sorted(files) if name.endswith(_TEXTS) or name == _ORIGINS)
    return {
        "number": number,
        "texts": {name: files[name] for name in shown},
        "passes": [{**of, "time": seconds_text(Range.exactly(of["seconds"]))} for of in passes],
        "saved": json.loads(files.get(_ORIGINS, "{}")).get("saved"),
    }
