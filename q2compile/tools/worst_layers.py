# SPDX-License-Identifier: Apache-2.0
"""Which layers go back to bf16, by the measurements of `compare`; the one place that decides it.

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


def kinds_of(names: Iterable[str]) -> list[list[str]]:
    """Names that differ only in the numbers of blocks, together; in the order in which they come. A
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
    rank = {m["module"]: _rank(m) for m in modules}
    return sorted(kinds_of(rank), key=lambda of: -sum(rank[name] for name in of))


def worst_layers(
    modules: Sequence[Mapping[str, Any]],
    budget: float,
    of: str = "flops",
    device: str = DEVICES[0].column,
) -> list[list[str]]:
    """The kinds of layers that go back to bf16, the worst first; one for which the budget has no
    room left is passed over. For the arguments see `Comparison.policy`.

    Raises ValueError where a size is symbolic, so that nothing is known of costs.
    """
    by_name = {m["module"]: m for m in modules}
    chosen = []
    room = budget * total_size(modules, of, device)
    for kind in ranked(modules) if budget else []:
        cost = sum(cost_of(by_name[name], of, device) for name in kind)
        if cost <= room * (1 + 1e-9):
            chosen.append(kind)
            room -= cost
    return chosen


def policy_of(
    kinds: Iterable[Sequence[str]], names: Sequence[str], value: Any = "bf16"
) -> dict[str, Any]:
    """The rules that give ``value`` to these kinds, and to none of the other ``names``."""
    return {pattern: value for kind in kinds for pattern in patterns_of(kind, names)}


def after(given: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """The policy ``given`` with ``rules`` after it: the last rule that matches wins."""
    return {p: v for p, v in given.items() if p not in rules} | dict(rules)


def total_size(modules: Iterable[Mapping[str, Any]], of: str, device: str) -> float:
    """The FLOPs, or the time, of all quantized matmuls: a budget is a share of it."""
    return sum(_size(m, of, device) for m in modules)


def cost_of(module: Mapping[str, Any], of: str, device: str) -> float:
    """The part of the budget that a module in bf16 uses up."""
    size = _size(module, of, device)
    return size if of == "flops" else max(0.0, module["bf16_microseconds"][device] - size)


def _size(module: Mapping[str, Any], of: str, device: str) -> float:
    size = module["flops"] if of == "flops" else module["microseconds"].get(device)
    if size is None:
        raise ConfigError(
            f"policy: the size of {module['module']!r} is symbolic, so its cost is not known"
        )
    return float(size)


def _rank(module: Mapping[str, Any]) -> float:
    effect, share = module.get("effect"), module.get("share")
    if effect is not None:
        return math.inf if math.isnan(effect) else float(effect) ** 2
    if share is not None:
        return math.inf if math.isnan(share) else float(share)
    errors = [module[gemm] or 0.0 for gemm in GEMMS]
    return math.inf if any(map(math.isnan, errors)) else float(max(errors))
