# SPDX-License-Identifier: Apache-2.0
"""Problems of a run and what to do about them: a few sentences, and one policy. For them it is
computed how far the errors of matmuls are from those of Gaussian data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from q2compile.cost_model.devices import shown_devices
from q2compile.cost_model.ranges import Range, over_bf16
from q2compile.errors import ConfigError
from q2compile.recipes.policy import AUTO, compiled_pattern, patterns_of
from q2compile.recipes.recipe import BF16, GEMMS, Gemm, Operand
from q2compile.report.model_rows import of_model
from q2compile.report.slower import is_slower, slower_text
from q2compile.runtime_kernels.ops.gaussian import gaussian_error
from q2compile.tools.worst_layers import (
    BUDGET,
    after,
    kinds_of,
    policy_of,
    ranked,
    worst_layers,
)

Data = Mapping[str, Any]
# An error so many times Gaussian data's comes of outliers, which take the range of their blocks.
OUTLIERS = 1.25


@dataclass(frozen=True)
class Error:
    """A relative error, and the one that the scheme makes on N(0, 1).

    what   "dy of wgrad" of an operand, "wgrad" of a GEMM's result
    step   of the record; None from a comparison
    """

    module: str
    gemm: str
    what: str
    error: float
    gaussian: float
    step: int | None = None

    @property
    def ratio(self) -> float:
        return self.error / self.gaussian

    def to_json(self) -> dict[str, Any]:
        own = {"what": self.what, "error": self.error, "gaussian": round(self.gaussian, 4)}
        high = self.ratio >= OUTLIERS
        return {"ratio": round(self.ratio, 4), "high": high, **own, "step": self.step}


def operand_errors(telemetry: Data | None) -> list[Error]:
    """The last recorded error of each operand on each rank; the worst first."""
    operands = telemetry["operands"] if telemetry else ()
    errors = [
        Error(
            *(o["module"], o["gemm"], f"{o['operand']} of {o['gemm']}"),
            *(o["last"]["relative_error"], o["gaussian"], o["last"]["step"]),
        )
        for o in operands
        if o["last"] and o["gaussian"]
    ]
    return sorted(errors, key=lambda e: -e.ratio)


def gemm_errors(comparison: Data | None, rows: Iterable[Data]) -> list[Error]:
    """The error of each GEMM's result, on operands of the bf16 run, from a comparison under a
    recipe of the rows' matmuls. The worst first."""
    errors = []
    by_module = {row["module"]: row for row in rows if row["taken"]}
    for module in comparison["modules"] if comparison else ():
        row = by_module.get(module["module"])
        for gemm in GEMMS:
            gaussian = gaussian_of_gemm(row, gemm) if row else None
            if gaussian and module[gemm] is not None:
                errors.append(Error(module["module"], gemm, gemm, module[gemm], gaussian))
    return sorted(errors, key=lambda e: -e.ratio)


def gaussian_of_gemm(row: Data, gemm: str) -> float | None:
    """Relative error of a GEMM's result on independent Gaussian operands: the squares of the
    roundings add up. None for a GEMM in bf16."""
    squares = [gaussian_error(operand.scheme) for operand in _rounded(row, gemm)]
    if not squares or None in squares:
        return None
    return sum(e**2 for e in squares if e is not None) ** 0.5


def _rounded(row: Data, gemm: str) -> Iterator[Operand]:
    """Each rounding on the way to a GEMM's operands: one that is made of fprop's codes was rounded
    for fprop before."""
    own, fprop = Gemm.parse(row[gemm]), Gemm.parse(row["fprop"])
    if own is None:
        return
    for role, operand in zip(GEMMS[gemm], (own.a, own.b), strict=True):
        yield operand
        if operand.requantized and fprop is not None:
            yield fprop.a if role == "x" else fprop.b


def worst_by_module(errors: Sequence[Error]) -> dict[str, Error]:
    """The worst of each module, of errors in order."""
    worst: dict[str, Error] = {}
    for error in errors:
        worst.setdefault(error.module, error)
    return worst


def shares(comparison: Data | None) -> dict[str, float]:
    """Module -> its share of the gradient's squared error."""
    modules = comparison["modules"] if comparison else ()
    return {m["module"]: m["share"] for m in modules if m["share"] is not None}


# A kind of layer stands out with this share of the gradient's squared error, and so many times
# its share of the FLOPs.
SHARE, TIMES = 0.1, 2.0
_SENTENCES, _NAMED = 4, 3
Finding = dict[str, Any]
Rules = dict[str, Any]


def findings(
    rows: Sequence[Data],
    telemetry: Data | None,
    comparison: Data | None,
    operands: Sequence[Error],
    given: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """[{"text": a sentence, "policy": as it stands in options, or None, "about": what that is}], at
    most four. One policy follows from all of them, if any does; the last that adds a rule has it.

    rows        as `Row.to_json` gives them; telemetry, comparison: what a run recorded, or None
    operands    the telemetry's errors, the worst first
    given       the policies that are in force, one for each part of the model with its own options
    """
    if not (rows or telemetry or comparison):
        return []
    own = of_model(rows)
    layers = _Layers(own, telemetry, comparison, given)
    bad = bool(telemetry and telemetry["nonfinite"])
    found = [
        *(_nonfinite(telemetry, layers) if bad else ()),
        *_shares(comparison, layers),
        *_slower([row for row in own if row["taken"]], layers),
        *_outliers(operands, layers),
        *_finite(telemetry if not bad else None),
    ]
    found = [*found[:_SENTENCES], *_unknown(telemetry, comparison)][:_SENTENCES]
    sentences: list[Finding] = [{"text": t, "policy": None, "about": ""} for t, _ in found]
    adding = [sentence for sentence, (_, rules) in zip(sentences, found, strict=True) if rules]
    if adding:
        adding[-1] |= _policy([rules for _, rules in found], layers, len(adding) > 1)
    return sentences


class _Layers:
    """The layers of a run, and the policies that are in force."""

    def __init__(
        self,
        rows: Sequence[Data],
        telemetry: Data | None,
        comparison: Data | None,
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        self.given = list(given)
        weights = [row for row in rows if row["has_parameter"]]
        self.names = [row["module"] for row in weights]
        self.names += [m["module"] for m in comparison["modules"]] if comparison else []
        self.names += [o["module"] for o in telemetry["operands"]] if telemetry else []
        self._served: dict[str, list[str]] = {}
        for row in weights:
            self._served.setdefault(row["module"], [row["module"], *row["served"]])

    def with_equal(self, name: str) -> tuple[str, ...]:
        """The layer and those that share its graph, which a policy must treat alike. Without a dump
        it is not known which do: all of its kind."""
        of_kind = next((kind for kind in kinds_of(self.names) if name in kind), [name])
        return tuple(self._served.get(name, of_kind))

    def rule_in_force(self, name: str) -> Any:
        """The value of the rule that holds for a layer; None without one."""
        policy = self.given[0] if self.given else {}
        matching = [v for p, v in policy.items() if compiled_pattern(p).fullmatch(name)]
        return matching[-1] if matching else None

    def called(self, kinds: Sequence[Sequence[str]]) -> str:
        """Kinds of layers in a sentence, by their last component if that identifies them."""
        names = [
            of[0] if len(of) == 1 else patterns_of(of, self.names)[0].removeprefix("*.")
            for of in kinds
        ]
        more = len(names) - _NAMED
        names = names[:_NAMED] + [f"{more} more kind{'s' * (more > 1)}"] * (more > 0)
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _policy(found: Iterable[Rules], layers: _Layers, of_several: bool) -> Finding:
    """The rules of all findings as one policy. Rules that leave a part of a layer in 4 bits come
    before those that leave none, since the last match wins."""
    rules = [item for of in found for item in of.items()]
    rules.sort(key=lambda rule: rule[1] == BF16)
    several = len(layers.given) > 1
    given = layers.given[0] if layers.given and not several else {}
    what = "All of this as one policy" if of_several else "As a policy"
    about = f"{what}, after the rules that are in force:" if given else f"{what}:"
    if several:
        about = "Rules for the end of the policy of each part:"
    written = json.dumps(after(given, dict(rules)), ensure_ascii=False)
    return {"policy": f'"policy": {written}', "about": about}


def _nonfinite(telemetry: Data | None, layers: _Layers) -> list[tuple[str, Rules]]:
    first = min(telemetry["nonfinite"], key=lambda f: f["step"]) if telemetry else {}
    module = first["module"]
    text = (
        f"The first NaN or Inf appeared in {first['operand']} of {first['gemm']} of {module}, at "
        f"step {first['step']}. If it does not appear with this module in BF16, rounding caused it."
    )
    return [(text, policy_of({layers.with_equal(module): BF16}, layers.names))]


def _finite(telemetry: Data | None) -> list[tuple[str, Rules]]:
    if telemetry is None or telemetry["last"] is None:
        return []
    return [(f"No NaN or Inf appeared up to step {telemetry['last']}, the last recorded one.", {})]


def _shares(comparison: Data | None, layers: _Layers) -> list[tuple[str, Rules]]:
    """The kinds of layers that the comparison puts into FP8 or BF16, or else the worst one."""
    if not comparison or not (share := shares(comparison)):
        return []
    flops = {m["module"]: m["flops"] or 0 for m in comparison["modules"]}
    total = sum(flops.values())
    limits = comparison.get("limits") or {"budget": BUDGET}
    try:
        chosen = worst_layers(comparison["modules"], **limits)
    except ConfigError:  # costs are not known
        chosen = {}
    shown = [*chosen] or ranked(comparison["modules"])[:1]
    part = sum(share.get(name, 0.0) for kind in shown for name in kind)
    work = sum(flops[name] for kind in shown for name in kind) / total if total else 0.0
    accounts = "accounts" if len(shown) == 1 else "account"
    what = f"{layers.called(shown)} {accounts} for {part:.0%} of the gradient's squared error"
    rules = policy_of(chosen, layers.names)
    if part < max(SHARE, TIMES * work):
        text = f"No kind of layer stands out: {what} and {_percent(work)} of the quantized FLOPs."
        return [(text, rules)]
    text = f"{what} but only {_percent(work)} of the quantized FLOPs."
    if not chosen:
        text += f" It costs more than the budget of q2compile compare, {limits['budget']:.0%}."
    return [(text, rules)]


def _slower(taken: Sequence[Data], layers: _Layers) -> list[tuple[str, Rules]]:
    """Layers that are predicted to lose time."""
    predicted = [row for row in taken if row["predicted"]]
    shown = shown_devices(row["predicted"] for row in predicted)
    device = next(device for device in shown if not device.emulates)
    times = {
        tuple(kind): [row["predicted"][device.column] for row in predicted if row["module"] in kind]
        for kind in kinds_of(row["module"] for row in predicted)
    }
    slower = {kind: ratio for kind, of in times.items() if is_slower(ratio := over_bf16(of))}
    if not slower:
        return []
    if len(slower) == len(times):
        text = slower_text([one for of in times.values() for one in of], device, in_fp4=True)
        return [(f"On a {device.name} {text}.", {})]
    ratios = slower.values()
    ends = Range(min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios))
    are = "is" if len(slower) == 1 else "are"
    text = (
        f"On a {device.name}, {layers.called([*slower])} {are} predicted to take {ends.text()} "
        "times as long as in BF16."
    )
    return [(text, policy_of(dict.fromkeys(slower, BF16), layers.names))]


def _outliers(operands: Sequence[Error], layers: _Layers) -> list[tuple[str, Rules]]:
    if not operands:
        return []
    worst = operands[0]
    if worst.ratio < OUTLIERS:
        than = f"{worst.ratio - 1:.0%} less" if worst.ratio >= 1.005 else "not less"
        text = f"No outlier problem: the worst operand ({worst.module}) is {than} accurate than"
        return [(f"{text} Gaussian data.", {})]
    text = (
        f"Outliers take up the range of their blocks in {worst.what} of {worst.module}: its error "
        f"is {worst.ratio:.2f} times that of Gaussian data ({worst.error:.3f}, step {worst.step})."
    )
    rule = layers.rule_in_force(worst.module)
    if isinstance(rule, str):
        rule = {} if rule == AUTO else {"recipe": rule}
    value = {**(rule or {}), worst.gemm: BF16}
    return [(text, policy_of({layers.with_equal(worst.module): value}, layers.names))]


def _unknown(telemetry: Data | None, comparison: Data | None) -> list[tuple[str, Rules]]:
    """Data that this folder lacks, and how to add it."""
    sentences = []
    if telemetry is None:
        sentences.append(
            'To see the errors of operands, train with options={"telemetry": {"to": '
            '"RUN/telemetry"}}.'
        )
    if comparison is None:
        sentences.append(
            "To see which layers cause the gradient's error, run "
            "q2compile compare FILE.py:FUNCTION --out RUN/compare."
        )
    return [(" ".join(sentences), {})] if sentences else []


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
