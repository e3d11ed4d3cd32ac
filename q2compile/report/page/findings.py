# SPDX-License-Identifier: Apache-2.0
"""Problems of a run and what to do about them: a few sentences, derived from its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from q2compile.cost_model.devices import DEVICES
from q2compile.recipes.policy import pattern_of, patterns_of
from q2compile.report.page.errors import OUTLIERS, Data, Error, shares

# A kind of layer stands out with this share of the gradient's squared error, and so many times
# its share of the FLOPs.
_SHARE, _TIMES = 0.1, 2.0
_SLOWER = 1.005
_NAMED = 3
Finding = dict[str, Any]


def findings(
    rows: Sequence[Data],
    telemetry: Data | None,
    comparison: Data | None,
    operands: Sequence[Error],
) -> list[Finding]:
    """[{"text": a sentence, "policy": as it stands in options, or None}], at most four.

    rows        as `Row.to_json` gives them; telemetry, comparison: what a run recorded, or None
    operands    the telemetry's errors, the worst first
    """
    names = [row["module"] for row in rows if row["has_parameter"]]
    names += [m["module"] for m in comparison["modules"]] if comparison else []
    bad = bool(telemetry and telemetry["nonfinite"])
    found = [
        *(_nonfinite(telemetry) if bad else ()),
        *_shares(comparison, names),
        *_slower([row for row in rows if row["taken"]], names),
        *_outliers(operands),
        *_finite(telemetry if not bad else None),
    ]
    return [*found[:4], *_unknown(telemetry, comparison)][:4] if rows or telemetry else []


def _nonfinite(telemetry: Data | None) -> list[Finding]:
    first = min(telemetry["nonfinite"], key=lambda f: f["step"]) if telemetry else {}
    module = first["module"]
    text = (
        f"NaN or Inf came first in {first['operand']} of {first['gemm']} of {module}, at step "
        f"{first['step']}. If it does not occur with this module in BF16, rounding caused it."
    )
    return [_finding(text, {pattern_of(module): "bf16"})]


def _finite(telemetry: Data | None) -> list[Finding]:
    if telemetry is None or telemetry["last"] is None:
        return []
    return [_finding(f"No NaN or Inf up to step {telemetry['last']}, the last that was recorded.")]


def _shares(comparison: Data | None, names: Sequence[str]) -> list[Finding]:
    """The kinds of layers that make more of the gradient's error than their work explains."""
    if not comparison or not (share := shares(comparison)):
        return []
    flops = {m["module"]: m["flops"] or 0 for m in comparison["modules"]}
    total = sum(flops.values())
    kinds = sorted(_kinds(share), key=lambda of: -sum(share[n] for n in of))
    parts = [sum(share[n] for n in of) for of in kinds]
    works = [sum(flops[n] for n in of) / total if total else 0.0 for of in kinds]
    figures = list(zip(kinds, parts, works, strict=True))
    stand_out = [f for f in figures if f[1] >= max(_SHARE, _TIMES * f[2])][:_NAMED]
    shown = stand_out or figures[:1]
    part, work = sum(f[1] for f in shown), sum(f[2] for f in shown)
    makes = "makes" if len(shown) == 1 else "make"
    text = (
        f"{_listed([_called(of, names) for of, *_ in shown])} {makes} {part:.0%} of the gradient's "
        f"squared error for {_percent(work)} of the quantized FLOPs"
    )
    if not stand_out:
        return [_finding(f"No kind of layer stands out: {text}.")]
    patterns = [pattern for of, *_ in shown for pattern in patterns_of(of, names)]
    return [_finding(f"{text}.", dict.fromkeys(patterns, "bf16"))]


def _slower(taken: Sequence[Data], names: Sequence[str]) -> list[Finding]:
    """Layers that are predicted to lose time."""
    device = DEVICES[0]
    ratios = {}
    for of in _kinds(row["module"] for row in taken if row["predicted"]):
        times = [row["predicted"][device.column] for row in taken if row["module"] in of]
        own, bf16 = (sum(t[k] for t in times) for k in ("microseconds", "bf16_microseconds"))
        ratios[tuple(of)] = own / bf16
    slower = {of: ratio for of, ratio in ratios.items() if ratio > _SLOWER}
    if not slower:
        return []
    low, high = (f"{bound(slower.values()):.2f}" for bound in (min, max))
    times_text = f"{low} times" if low == high else f"{low} to {high} times"
    where = f"predicted slower than BF16 on a {device.name}, {times_text} its time"
    if len(slower) == len(ratios):
        text = f"At these sizes every matmul taken is {where}, GEMMs and quantizers alone."
        return [_finding(text, {"*": "auto"})]
    called = [_called(of, names) for of in slower]
    shown = called[:_NAMED] + [f"{len(called) - _NAMED} more kinds"] * (len(called) > _NAMED)
    are = "is" if len(slower) == 1 else "are"
    patterns = [pattern for of in slower for pattern in patterns_of(of, names)]
    return [_finding(f"{_listed(shown)} {are} {where}.", dict.fromkeys(patterns, "bf16"))]


def _outliers(operands: Sequence[Error]) -> list[Finding]:
    if not operands:
        return []
    worst = operands[0]
    times = f"{worst.ratio:.2f} times the error of Gaussian data"
    if worst.ratio < OUTLIERS:
        return [_finding(f"No operand is rounded with more than {times} ({worst.module}).")]
    text = (
        f"{worst.what} of {worst.module} is rounded with {times} "
        f"({worst.error:.3f}, step {worst.step}): outliers take its blocks' range."
    )
    return [_finding(text, {pattern_of(worst.module): {worst.gemm: "bf16"}})]


def _unknown(telemetry: Data | None, comparison: Data | None) -> list[Finding]:
    """Data that this folder lacks, and how to add it."""
    sentences = []
    if telemetry is None:
        sentences.append(
            'This run did not record the errors of operands: options={"telemetry": {"to": '
            '"RUN/telemetry"}} records them.'
        )
    if comparison is None:
        sentences.append(
            "This run did not measure which layers make the gradient's error: "
            "q2compile compare FILE.py:FUNCTION --out RUN/compare measures it."
        )
    return [_finding(" ".join(sentences))] if sentences else []


def _finding(text: str, policy: Mapping[str, Any] | None = None) -> Finding:
    written = None if policy is None else f'"policy": {json.dumps(policy, ensure_ascii=False)}'
    return {"text": text, "policy": written}


def _kinds(names: Iterable[str]) -> list[list[str]]:
    """Names that differ only in layer numbers, merged."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return list(kinds.values())


def _called(of: Sequence[str], names: Sequence[str]) -> str:
    """The name of a kind of layer in a sentence: its last component, if that identifies it."""
    if len(of) == 1:
        return of[0]
    return patterns_of(of, names)[0].removeprefix("*.")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
