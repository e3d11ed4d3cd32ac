# SPDX-License-Identifier: Apache-2.0
"""The data of the report page, and the page.

The page is one HTML file, and opening it loads nothing else. Its data is a JSON document, packed
(`packed`) in the element with the id "data":

    name       of the run's folder, or "explain"
    headline   a sentence (`headline`)
    findings   [{"text", "policy", "about"}, ...] (`findings`)
    devices    [{"column": "b200", "name": "B200"}, ...], of the predictions
    assumptions  what the predictions stand on
    times      the tiles of times (`time_tiles`)
    recipes    [{"name", "fprop", "dgrad", "wgrad"}, ...]: each distinct one that was used
    rows       report.json's, where recipe is a place in recipes for a row that was taken and null
               for others; predicted and measured are as `beside_bf16` gives them; and beside
               them error (`findings.Error`, the worst of the matmul's operands, or of its GEMMs by
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
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from q2compile.cost_model.devices import ASSUMPTIONS, Device, shown_devices
from q2compile.cost_model.ranges import Range, own_and_bf16
from q2compile.recipes.recipe import GEMMS
from q2compile.report.model_rows import layers, of_model, rows_of_layers
from q2compile.report.slower import is_slower
from q2compile.tools.page.findings import (
    Error,
    findings,
    gemm_errors,
    operand_errors,
    shares,
    worst_by_module,
)
from q2compile.tools.time_words import ratio_text, seconds_text, time_words

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
_TEXTS = (".txt", ".py")  # of a graph that the page shows
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
    shown = (name for name in sorted(files) if name.endswith(_TEXTS))
    return {
        "number": number,
        "texts": {name: files[name] for name in shown},
        "passes": [{**of, "time": seconds_text(Range.exactly(of["seconds"]))} for of in passes],
        "saved": json.loads(files.get("nodes.json", "{}")).get("saved"),
    }


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


Data = Mapping[str, Any]


def beside_bf16(times: Iterable[Data]) -> dict[str, Any]:
    """The sum of times on one device: {"ratio": over BF16's, "text": the same with both ends,
    "words", "slower": as findings say so, "own": {"value", "text"}, "bf16": likewise}."""
    own, bf16 = own_and_bf16(times)
    ratio = own / bf16
    bars = {
        name: {"value": of.middle, "text": seconds_text(1e-6 * of)}
        for name, of in (("own", own), ("bf16", bf16))
    }
    words = {"text": ratio.text(), "words": time_words(ratio), "slower": is_slower(ratio)}
    return {"ratio": ratio.middle, **words, **bars}


def time_tiles(rows: Sequence[Data], devices: Sequence[Device]) -> dict[str, Any]:
    """{"predicted": {"text": times BF16's, over all devices, "devices": [`beside_bf16` and "name",
    ...]}, "measured": likewise}; null without a time. rows: each layer once."""
    taken = [row["predicted"] for row in rows if row["taken"]]
    predicted = {d.name: [of[d.column] for of in taken if d.column in of] for d in devices}
    measured: dict[str, list[Data]] = {}
    for row in rows:
        if row["measured"]:
            measured.setdefault(row["measured"]["device"], []).append(row["measured"])
    return {"predicted": _tile(predicted), "measured": _tile(measured)}


def _tile(times: Mapping[str, Sequence[Data]]) -> dict[str, Any] | None:
    known = {name: of for name, of in times.items() if of}
    if not known:
        return None
    ratios = [own / bf16 for own, bf16 in map(own_and_bf16, known.values())]
    ends = [end for ratio in ratios for end in (ratio.low, ratio.high)]
    shown = [{"name": name, **beside_bf16(of)} for name, of in known.items()]
    return {"text": ratio_text(Range(min(ends), max(ends))), "devices": shown}
