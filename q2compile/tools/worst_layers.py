# SPDX-License-Identifier: Apache-2.0
"""Which layers go to FP8 or back to BF16, by the measurements of `compare`; the one place that
decides it.

Layers are chosen by kind: modules whose names differ only in numbers belong together. A policy that
tells equal layers apart is refused where one graph serves them, as under FSDP2, and `compare` can't
know how the model will be trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from q2compile.cost_model.devices import DEVICES
from q2compile.errors import ConfigError
from q2compile.recipes.policy import patterns_of
from q2compile.recipes.recipe import GEMMS

BUDGET = 0.1  # of `compare`, where none is given
_STEPS = 2000  # that a budget is divided into, so that not all choices need be kept


def kinds_of(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ only in the numbers of blocks, in the order in which they come. A
    number at the end is a place in a sequence, of layers that need not be alike."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(re.sub(r"\d+(?=\.)", "#", name), []).append(name)
    return list(kinds.values())


def ranked(modules: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The kinds of the modules of a comparison, the worst first: by the sum of their squared
    effects on the gradient, or else by the largest error of a GEMM.

    modules  as a compare.json has them
    """
    rank = {m["module"]: rank_of(m) for m in modules}
    return sorted(kinds_of(rank), key=lambda of: -sum(rank[name] for name in of))


def worst_layers(
    modules: Sequence[Mapping[str, Any]],
    budget: float,
    of: str = "flops",
    device: str = DEVICES[0].column,
) -> dict[tuple[str, ...], str]:
    """Kinds of layers -> "fp8" or "bf16": the choice that removes most of the error for what the
    budget allows, with the kind of which most is removed first. For the arguments see
    `Comparison.policy`.

    Raises ValueError where a size is symbolic, so that nothing is known of costs.
    """
    room = budget * sum(_size(m, of, device) for m in modules)
    by_name = {m["module"]: m for m in modules}
    # The best choices found so far at each cost: (cost, error removed, kind -> (value, its part)).
    best: list[tuple[float, float, dict[tuple[str, ...], tuple[str, float]]]] = [(0.0, 0.0, {})]
    for kind in ranked(modules) if budget else []:
        members = [by_name[name] for name in kind]
        found = list(best)
        for value in ("fp8", "bf16"):
            gain = sum(_removed(m, value) for m in members)
            cost = sum(_cost(m, of, device, value) for m in members) if gain > 0 else math.inf
            found += [
                (at + cost, removed + gain, choices | {tuple(kind): (value, gain)})
                for at, removed, choices in best
                if at + cost <= room * (1 + 1e-9)
            ]
        at_cost = {round(_STEPS * one[0] / room): one for one in sorted(found, key=_by_removed)}
        best = list(at_cost.values())
    _, _, choices = max(best, key=_by_removed)
    worst_first = sorted(choices.items(), key=lambda item: -item[1][1])
    return {kind: value for kind, (value, _) in worst_first}


def _by_removed(choice: tuple[float, float, Any]) -> tuple[float, float]:
    """The key of a choice of `worst_layers`: more error removed is better, then less cost."""
    cost, removed, _ = choice
    return removed, -cost


def needed_budget(
    kind: Sequence[str], modules: Sequence[Mapping[str, Any]], of: str, device: str
) -> float:
    """The budget that a kind needs in bf16, rounded up to a percent."""
    cost = sum(_cost(m, of, device, "bf16") for m in modules if m["module"] in kind)
    share = cost / sum(_size(m, of, device) for m in modules)
    return min(1.0, math.ceil(100 * share - 1e-6) / 100)


def policy_of(chosen: Mapping[tuple[str, ...], Any], names: Sequence[str]) -> dict[str, Any]:
    """The rules that give each kind its value; they match no other of ``names``."""
    return {p: value for kind, value in chosen.items() for p in patterns_of(kind, names)}


def after(given: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """The policy ``given`` with ``rules`` after it: the last rule that matches wins."""
    return {p: v for p, v in given.items() if p not in rules} | dict(rules)


def _cost(module: Mapping[str, Any], of: str, device: str, value: str) -> float:
    """The part of the budget that a module in bf16 or fp8 uses up."""
    size = _size(module, of, device)
    if of == "flops":  # a GEMM in FP8 takes twice the time of one in FP4, in BF16 four times
        return size if value == "bf16" else size / 3
    times = module["bf16_microseconds"] if value == "bf16" else module.get("fp8_microseconds", {})
    return max(0.0, times.get(device, math.inf) - size)


def _removed(module: Mapping[str, Any], value: str) -> float:
    """The error that a module no longer makes in bf16 or fp8, as `rank_of` measures it. What no
    number measures counts as more than all others."""
    rank = min(rank_of(module), 1e30)
    if value == "bf16":
        return rank
    left = module.get("fp8_effect")
    return rank - left**2 if left is not None and rank < 1e30 else 0.0


def _size(module: Mapping[str, Any], of: str, device: str) -> float:
    size = module["flops"] if of == "flops" else module["microseconds"].get(device)
    if size is None:
        raise ConfigError(
            f"policy: the size of {module['module']!r} is symbolic, so its cost is not known"
        )
    return float(size)


def rank_of(module: Mapping[str, Any]) -> float:
    """The key that modules are ranked by: the squared effect, or else the largest error."""
    effect, share = module.get("effect"), module.get("share")
    if effect is not None:
        return math.inf if math.isnan(effect) else float(effect) ** 2
    if share is not None:
        return math.inf if math.isnan(share) else float(share)
    errors = [module[gemm] or 0.0 for gemm in GEMMS]
    return math.inf if any(map(math.isnan, errors)) else float(max(errors))
