"""The cost of a layer under a recipe, beside BF16's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from q2compile.cost_model.devices import DEVICES, Device
from q2compile.cost_model.steps import Layer, Step, bf16_steps, recipe_steps
from q2compile.recipes.recipe import GEMMS, Recipe


@dataclass(frozen=True)
class Prediction:
    """What one layer moves and multiplies under a recipe, and its time beside BF16's.

    flops, bytes: numbers, or sympy expressions where a size is symbolic
    seconds, bf16_seconds: by `Device.column`, at the hint of a symbolic size
    at: {symbol: hint} of what was put in for symbols
    """

    flops: Any
    bytes: Any
    seconds: dict[str, float]
    bf16_seconds: dict[str, float]
    at: dict[str, int] = field(default_factory=dict)

    def speed(self, device: Device) -> float:
        """How many times as fast as BF16."""
        return self.bf16_seconds[device.column] / self.seconds[device.column]

    def plain(self) -> tuple[int | str, int | str, dict[str, dict[str, float]]]:
        """FLOPs, bytes and times for a `report.Row`; text where a size is symbolic."""
        exact = [self.flops, self.bytes]
        if not self.at:
            exact = [int(n) for n in exact]
        times = {
            d.column: {
                "speed": round(self.speed(d), 3),
                "microseconds": round(1e6 * self.seconds[d.column], 2),
                "bf16_microseconds": round(1e6 * self.bf16_seconds[d.column], 2),
            }
            for d in DEVICES
        }
        flops, bytes_ = (n if isinstance(n, int) else str(n) for n in exact)
        return flops, bytes_, times


def predict(
    recipe: Recipe,
    shape: tuple[Any, ...],
    gemms: Iterable[str] = tuple(GEMMS),
    x_users: int = 1,
    w_quantised: int = 1,
) -> Prediction | None:
    """The cost of a layer of ``shape`` (T, N, K), or (E, T, N, K) for experts.

    Sizes are ints, SymInts or sympy symbols with hints. A symbolic size is read by its hint, and no
    guard is added: another size would be predicted otherwise, and runs in the same graph. None if a
    symbol has no hint, or the layer has no rows: nothing can be said.
    """
    gemms = list(gemms)
    experts = shape[0] if len(shape) == 4 else 1
    hints = [_hint(n) for n in shape[-3:]]
    if None in hints or 0 in hints:
        return None
    t, n, k = map(_expression, shape[-3:])
    layer = Layer(t, n, k, experts, x_users, w_quantised)
    concrete = replace(layer, **dict(zip("tnk", hints, strict=True)))
    steps = recipe_steps(recipe, layer, gemms)
    at = {str(n): hint for n, hint in zip(shape[-3:], hints, strict=True) if str(n) != str(hint)}
    return Prediction(
        flops=sum(s.flops for s in steps),
        bytes=sum(s.bits / s.shared_by for s in steps) / 8,
        seconds=_by_device(recipe_steps(recipe, concrete, gemms)),
        bf16_seconds=_by_device(bf16_steps(concrete, gemms)),
        at=at,
    )


def _by_device(steps: list[Step]) -> dict[str, float]:
    return {d.column: sum(s.seconds(d) for s in steps) for d in DEVICES}


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size
