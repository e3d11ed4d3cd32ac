# SPDX-License-Identifier: Apache-2.0
"""The result of `compare`: the measurements, as a table and as a picture, and the policy that
follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from q2compile.cost_model.devices import DEVICES
from q2compile.cost_model.ranges import ENDS
from q2compile.errors import ConfigError, one_of, shown
from q2compile.recipes.recipe import GEMMS
from q2compile.report.printable import aligned, printable
from q2compile.report.row import Row, shape_text
from q2compile.tools.worst_layers import (
    after,
    needed_budget,
    policy_of,
    rank_of,
    ranked,
    worst_layers,
)

_WORDS = {"all": "the whole recipe", **{gemm: f"{gemm} alone" for gemm in GEMMS}}
_MOST = 12  # reasons of matmuls left; a model may have hundreds of one kind
_DRAWN = 40  # modules: more can't be read on one page


@dataclass
class ModuleError:
    """The errors and costs of one module.

    shape       "T×N×K" of its first matmul
    fprop, dgrad, wgrad   the relative error of that GEMM's result on the operands of the run in
                bf16; None for a GEMM that the recipe leaves or that is not needed
    gradient    the relative error of its weight's gradient with the whole recipe, to which all
                modules contribute; None if the weight has no gradient
    effect      the relative error of the gradient of all parameters if only this module is
                quantized; None if that was not run
    flops       those of its matmuls, forward and backward; None if a size is symbolic
    microseconds, bf16_microseconds, fp8_microseconds   device -> the predicted time of its matmuls
                with the recipe, in BF16, and in FP8
    ends        device -> the ends of those with the recipe and in BF16, as a report has them
    fp8_effect  its part of the effect of its kind of layer, if only that kind is in FP8; None if
                that was not run
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
    fp8_microseconds: dict[str, float] = field(default_factory=dict)
    ends: dict[str, dict[str, float]] = field(default_factory=dict)
    fp8_effect: float | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        in_fp8: Sequence[Row],
        **measured: float | None,
    ) -> ModuleError:
        """A module with its costs, from its rows under the recipe and under fp8. Each shape that
        was compiled counts once. measured: fields by name."""
        rows, in_fp8 = (list({r.shape: r for r in of}.values()) for of in (rows, in_fp8))
        flops = [row.flops for row in rows if isinstance(row.flops, int)]

        def predicted(key: str, rows: Sequence[Row] = rows) -> dict[str, float]:
            if not rows or not all(row.predicted for row in rows):
                return {}
            return {d.column: sum(r.predicted[d.column][key] for r in rows) for d in DEVICES}

        fields: dict[str, Any] = dict(measured)
        return cls(
            rows[0].module,
            shape_text(rows[0]),
            flops=sum(flops) if len(flops) == len(rows) else None,
            microseconds=predicted("microseconds"),
            bf16_microseconds=predicted("bf16_microseconds"),
            fp8_microseconds=predicted("microseconds", in_fp8),
            ends={
                device: {key: predicted(key)[device] for key in ENDS}
                for device in predicted("microseconds")
            },
            **fields,
        )


@dataclass
class Comparison:
    """The result of `compare`. Print it to see the table, worst module first.

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
        return sorted(self.modules, key=lambda m: -rank_of(vars(m)))

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
        """The modules that `policy` puts into fp8 or bf16, those with most error removed first."""
        by_name = {m.module: m for m in self.modules}
        return [by_name[name] for kind in self._chosen(budget, of, device) for name in kind]

    def too_large(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> tuple[list[ModuleError], float] | None:
        """The worst kind of layer and the budget that it needs, if `policy` leaves it out."""
        modules = self._as_json()
        worst = ranked(modules)[0]
        if tuple(worst) in self._chosen(budget, of, device):
            return None
        kind = [m for m in self.modules if m.module in worst]
        return kind, needed_budget(worst, modules, of, device)

    def _chosen(self, budget: float, of: str, device: str) -> dict[tuple[str, ...], str]:
        one_of("of", of, ("flops", "time"))
        one_of("device", device, [d.column for d in DEVICES])
        check_budget(budget)
        return worst_layers(self._as_json(), budget, of, device)

    def _as_json(self) -> list[dict[str, Any]]:
        return [{**asdict(m), "share": self.share(m)} for m in self.ranked]

    def policy(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> dict[str, str]:
        """{pattern: "fp8" or "bf16"}: the rules that remove most of the gradient's error for what
        the budget allows, to be used as, or added to, the option "policy". A kind of layer gets one
        rule; it is all layers whose names differ only in numbers, so the policy can be used where
        equal layers share a graph.

        budget  in [0, 1]. of="flops": the share of all quantized FLOPs that goes back to bf16. In
                fp8 they count a third, because FP8 takes twice and BF16 four times as long as FP4.
                of="time": by how much the predicted time of these matmuls may rise on ``device``
                ("b200", "rtx5090"), as a share of it. A kind that costs nothing, because bf16 is
                not slower for it, is always put back.

        The kind with the largest removed error comes first. Raises a ValueError for a budget
        outside [0, 1], and if a size is symbolic, so that costs are not known.
        """
        names = [*(m.module for m in self.modules), *self.left]
        return policy_of(self._chosen(budget, of, device), names)

    def options(
        self, budget: float, of: str = "flops", device: str = DEVICES[0].column
    ) -> dict[str, Any]:
        """Options for torch.compile, or as JSON for the file of Q2COMPILE_CONFIG: the recipe, and
        the policy that was given with `policy`'s lines after it."""
        recipe = dict(self.option) if isinstance(self.option, Mapping) else self.option
        policy = after(self.given_policy, self.policy(budget, of, device))
        return {"recipe": recipe, "policy": policy}

    def to_json(self) -> dict[str, Any]:
        """All measurements as plain mappings, lists and scalars; worst modules first."""
        return {
            "recipe": self.recipe,
            "losses": self.losses,
            "gradients": self.gradients,
            "modules": self._as_json(),
            "left": self.left,
            "policy": dict(self.given_policy),
        }

    def draw(self, path: str | Path) -> None:
        """Draw the ranking into a file, whose ending says its kind (png, svg, pdf): modules worst
        first, left the share of the gradient's squared error, right each GEMM's own relative error.

        Raises an ImportError if matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        modules = self.ranked[:_DRAWN]
        figure = Figure(figsize=(11, 1.6 + 0.22 * len(modules)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        places = range(len(modules))
        left.barh(places, [100 * (self.share(m) or 0.0) for m in modules], color="C3")
        left.set_yticks(places, [m.module for m in modules], fontsize=8)
        left.invert_yaxis()
        left.set_xlabel("share of the gradient's squared error, %")
        for gemm, marker in zip(GEMMS, "o^s", strict=True):
            points = [(getattr(m, gemm), i) for i, m in enumerate(modules)]
            known = [(error, i) for error, i in points if error is not None]
            if known:
                right.plot(*zip(*known, strict=True), marker, markersize=4, label=gemm)
        right.set_xlabel("relative error of the GEMM alone")
        right.set_xlim(left=0)
        right.legend(fontsize=8)
        for axis in (left, right):
            axis.grid(alpha=0.3, axis="x")
        more = f"; the worst {_DRAWN} of {len(self.modules)}" if len(self.modules) > _DRAWN else ""
        figure.suptitle(f"{self.recipe} against bf16{more}", fontsize=10)
        figure.savefig(path, dpi=120)

    def __str__(self) -> str:
        return printable(_text(self))


def check_budget(budget: object) -> None:
    """Raises ValueError unless ``budget`` is a share."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ConfigError(f"budget: got {shown(budget)}; allowed: a share, from 0 to 1")


def _text(c: Comparison) -> str:
    """Losses, the gradient's error, the modules worst first, and what was left."""
    bf16, own = c.losses["bf16"], c.losses[c.recipe]
    n = len(bf16)
    gap = sum(b - a for a, b in zip(bf16, own, strict=True)) / n
    lines = [
        f"{c.recipe} against bf16, {n} batch{'es' * (n > 1)}: "
        f"loss {sum(bf16) / n:.4f} in bf16, {gap:+.4f} in {c.recipe}",
        "",
        "relative error of the gradient of all parameters",
        *(f"  {_WORDS[run]:18}{sum(e) / len(e):.4f}" for run, e in c.gradients.items()),
        *_all_modules(c),
        "",
        *_modules(c),
    ]
    if c.left:
        reasons: dict[str, list[str]] = {}
        for module, why in c.left.items():
            reasons.setdefault(why, []).append(module)
        lines += ["", f"left as they are: {len(c.left)}"]
        for why, modules in list(reasons.items())[:_MOST]:
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            lines.append(f"  {', '.join(modules[:3])}{more}: {why}")
    return "\n".join(lines)


def _all_modules(c: Comparison) -> list[str]:
    """Lines that show how far the shares can be trusted: the sum of the modules' effects beside the
    error that was measured on the first batch."""
    if not c.sum_of_effects:
        return []
    return [
        f"  the modules' effects add up to {c.sum_of_effects:.4f} (root of the sum of squares), "
        f"measured on the first batch: {c.gradients['all'][0]:.4f}"
    ]


def _modules(c: Comparison) -> list[str]:
    """One line per module, worst first.

    share: its part of the gradient's squared error; effect: the gradient's error with this module
    alone quantized; fp8: that in FP8; fprop, dgrad, wgrad: each GEMM's own error; gradient: of its
    weight's gradient under the whole recipe.
    """
    head = ["module", "shape", "effect", "fp8", "share", *GEMMS, "gradient", "flops"]
    total = sum(m.flops or 0 for m in c.modules)
    rows = [
        [
            m.module,
            m.shape,
            _number(m.effect),
            _number(m.fp8_effect),
            _percent(c.share(m)),
            *(_number(getattr(m, gemm)) for gemm in GEMMS),
            _number(m.gradient),
            _percent(m.flops / total if m.flops is not None and total else None),
        ]
        for m in c.ranked
    ]
    return aligned(rows, head, left=2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
