# SPDX-License-Identifier: Apache-2.0
"""The data of the report page, and the page.

The page is one HTML file, and opening it loads nothing else. Its data is a JSON document, in the
element with the id "data":

    format     1
    name       of the run's folder, or "explain"
    headline   a sentence (`headline`)
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

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from q2compile.cost_model.devices import ASSUMPTIONS, shown_devices
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
from q2compile.tools.page.saved_tensors import saved_tensors

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
        "data": script_json(data),
        "script": script,
    }
    template = _static("report.html")
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: inserted[found[1]], template)


def _static(name: str) -> str:
    return (files("q2compile.tools.page") / "static" / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that may be put into a script element, whatever is in its strings."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half of a pair of surrogates, which a name in a model may be, is no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode()


def packed(text: str) -> str:
    """A long text as base64 of zlib's format, which browsers unpack (DecompressionStream)."""
    raw = zlib.compress(text.encode("utf-8", "backslashreplace"), 9)
    return base64.b64encode(raw).decode()


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
    recipes: dict[str, int] = {}
    kernels: dict[str, int] = {}
    texts: dict[str, int] = {}
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
        "recipes": [json.loads(text) for text in recipes],
        "kernels": [json.loads(text) for text in kernels],
        "rows": shown,
        # The headline and the bars say what the predictions are; `assumptions` what they stand on.
        "notes": [note for note in notes if not note.startswith("predicted")],
        "graphs": [_graph(number, files, texts) for number, files in sorted(graphs.items())],
        "texts": [packed(text) for text in texts],
        "telemetry": telemetry,
        "run": run or {},
    }


def _place(known: dict[str, int], text: str) -> int:
    """Where a text is among the distinct ones that are known, or is added now."""
    return known.setdefault(text, len(known))


def _row(
    row: Mapping[str, Any],
    recipes: dict[str, int],
    kernels: dict[str, int],
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
    shown["recipe"] = _place(recipes, json.dumps(named)) if row["taken"] else None
    shown["kernels"] = _place(kernels, json.dumps(run)) if row["taken"] else None
    return shown


def _graph(number: int, files: Mapping[str, str], texts: dict[str, int]) -> dict[str, Any]:
    saved = saved_tensors(files)
    return {
        "number": number,
        "texts": {
            name: _place(texts, text)
            for name, text in sorted(files.items())
            if name.endswith(_TEXTS) or name == _ORIGINS
        },
        "passes": json.loads(files.get("passes.json", "[]")),
        "saved": None if saved is None else _place(texts, json.dumps(saved)),
    }
