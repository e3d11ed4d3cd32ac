# SPDX-License-Identifier: Apache-2.0
"""The measurements of `compare`, and the policy that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from q2compile.cost_model.devices import DEVICES
from q2compile.errors import ConfigError, one_of, shown
from q2compile.recipes.policy import pattern_of
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row, shape_text

RUNS = ("all", *GEMMS)  # the whole recipe, and each of its GEMMs alone


@dataclass
class ModuleError:
    """One module.

    shape       "T×N×K"; of the first of its matmuls if it has more than one
    fprop, dgrad, wgrad   relative error of that GEMM's result on the operands of the run in bf16;
                None for a GEMM that the recipe leaves, or that nobody needs
    gradient    relative error of its weight's gradient under the whole recipe: what all modules do
                to it; None if the weight has none
    effect      relative error of the gradient of all parameters with this module alone quantized;
                None if that was not run
    flops       of its matmuls, forward and backward; None where a size is symbolic
    microseconds, bf16_microseconds   device -> predicted time of its matmuls
    """

    module: str
    shape: str
    fprop: float | None
    dgrad: float | None
    wgrad: float | None
    gradient: float | None
    effect: float | None
    flops: int | None
    microseconds: dict[str, float]
    bf16_microseconds: dict[str, float]

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        errors: dict[str, float | None],
        gradient: float | None,
        effect: float | None,
    ) -> ModuleError:
        """From the module's rows. Each shape that was compiled counts once."""
        rows = list({row.shape: row for row in rows}.values())
        flops = [row.flops for row in rows if isinstance(row.flops, int)]

        def predicted(key: str) -> dict[str, float]:
            if not all(row.predicted for row in rows):
                return {}
            return {d.column: sum(r.predicted[d.column][key] for r in rows) for d in DEVICES}

        return cls(
            rows[0].module,
            shape_text(rows[0]),
            fprop=errors["fprop"],
            dgrad=errors["dgrad"],
            wgrad=errors["wgrad"],
            gradient=gradient,
            effect=effect,
            flops=sum(flops) if len(flops) == len(rows) else None,
            microseconds=predicted("microseconds"),
            bf16_microseconds=predicted("bf16_microseconds"),
        )

    @property
    def rank(self) -> float:
        """The key that modules are ranked by: the effect, or else the largest error of a GEMM."""
        errors = (self.fprop, self.dgrad, self.wgrad) if self.effect is None else (self.effect,)
        return max(math.inf if math.isnan(e or 0.0) else e or 0.0 for e in errors)


@dataclass
class Measurements:
    """The error of a model's gradients under a recipe, by module.

    recipe     its name; ``option``: as it was given, ``given_policy``: the policy beside it
    losses     "bf16" and the recipe's name -> the loss of each batch
    gradients  "all", "fprop", "dgrad", "wgrad" -> the relative error of the gradient of all
               parameters, of each batch: under the whole recipe, and with that GEMM alone quantized
    modules    those that are quantized
    left       module -> why it is not quantized
    """

    recipe: str
    option: Any
    given_policy: Mapping[str, Any]
    losses: dict[str, list[float]] = field(default_factory=dict)
    gradients: dict[str, list[float]] = field(default_factory=dict)
    modules: list[ModuleError] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def note(self, run: str, error: float) -> None:
        self.gradients.setdefault(run, []).append(error)

    @property
    def ranked(self) -> list[ModuleError]:
        return sorted(self.modules, key=lambda m: -m.rank)

    @property
    def sum_of_effects(self) -> float:
        """√Σ effect²: what the whole recipe's error would be if the modules' were independent."""
        return sum((m.effect or 0.0) ** 2 for m in self.modules) ** 0.5

    def share(self, module: ModuleError) -> float | None:
        """The module's share of the sum of all squared effects. That is its share of the gradient's
        error, as the errors of modules are nearly independent. None if effects were not run."""
        total = self.sum_of_effects
        return (module.effect / total) ** 2 if module.effect is not None and total else None

    def chosen(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> list[ModuleError]:
        """The modules that `policy` gives back to bf16, worst first."""
        one_of("of", of, ("flops", "time"))
        one_of("device", device, [d.column for d in DEVICES])
        check_budget(budget)
        chosen, room = [], budget * sum(_size(m, of, device) for m in self.modules)
        for module in self.ranked if budget else []:
            cost = _cost(module, of, device)
            if cost <= room:
                chosen.append(module)
                room -= cost
        return chosen

    def too_large(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> tuple[ModuleError, float] | None:
        """The worst module and the budget that it needs, rounded up to a percent, if that is
        more than ``budget``."""
        worst = self.ranked[0]
        if worst in self.chosen(budget, of, device):
            return None
        share = _cost(worst, of, device) / sum(_size(m, of, device) for m in self.modules)
        return worst, min(1.0, math.ceil(100 * share - 1e-6) / 100)

    def policy(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> dict[str, str]:
        """{module: "bf16"} for the worst modules that the budget has room for, in their order in
        the model; to be used as, or added to, the option "policy".

        budget  in [0, 1]. of="flops": the share of all quantized FLOPs that goes back to bf16;
                of="time": by how much the predicted time of these matmuls may rise on ``device``
                ("b200", "rtx5090"), as a share of it. A module that costs nothing, because bf16 is
                not slower for it, is always taken.

        The worst come first; one that no longer fits is passed over. Raises ValueError for a budget
        that is none, and where a size is symbolic, so that nothing is known of costs.
        """
        names = {m.module for m in self.chosen(budget, of, device)}
        return {pattern_of(m.module): "bf16" for m in self.modules if m.module in names}

    def options(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> dict[str, Any]:
        """Options for torch.compile, or as JSON for the file of Q2COMPILE_CONFIG: the recipe, and
        the policy that was given with `policy`'s lines after it."""
        recipe = dict(self.option) if isinstance(self.option, Mapping) else self.option
        return {
            "recipe": recipe,
            "policy": {**self.given_policy, **self.policy(budget, of, device)},
        }

    def to_json(self) -> dict[str, Any]:
        """All measurements as plain mappings, lists and scalars; worst modules first."""
        return {
            "recipe": self.recipe,
            "losses": self.losses,
            "gradients": self.gradients,
            "modules": [{**asdict(m), "share": self.share(m)} for m in self.ranked],
            "left": self.left,
        }


def _size(module: ModuleError, of: str, device: str) -> float:
    """The time of the module's quantized matmuls."""
    size = module.flops if of == "flops" else module.microseconds.get(device)
    if size is None:
        raise ConfigError(
            f"policy: the size of {module.module!r} is symbolic, so its cost is not known"
        )
    return size


def check_budget(budget: object) -> None:
    """Raises ValueError for what is no share."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ConfigError(f"budget: got {shown(budget)}; allowed: a share, from 0 to 1")


def _cost(module: ModuleError, of: str, device: str) -> float:
    """The cost of the module in bf16, taken from the budget."""
    size = _size(module, of, device)
    return size if of == "flops" else max(0.0, module.bf16_microseconds[device] - size)
