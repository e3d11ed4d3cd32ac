# SPDX-License-Identifier: Apache-2.0
"""The cost of a layer under a recipe, beside BF16's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from q2compile.cost_model.devices import Device, reported_devices
from q2compile.cost_model.layer import Layer
from q2compile.cost_model.prices import bf16_steps, recipe_steps
from q2compile.cost_model.ranges import Range, longest, total
from q2compile.cost_model.step import Step
from q2compile.graph.storages import hint_of
from q2compile.recipes.recipe import GEMMS, Recipe


@dataclass(frozen=True)
class Prediction:
    """Bytes and FLOPs of one layer under a recipe, and its time beside BF16's.

    flops, bytes: on fp4 tensor cores; ints, or sympy expressions where a size is symbolic
    seconds, bf16_seconds: of the GPU, by `Device.column`, at the hint of a symbolic size
    host_seconds, bf16_host_seconds: of the host, likewise; 0 where a CUDA graph launches
    at: {symbol: hint}, the hints used for symbols
    """

    flops: Any
    bytes: Any
    seconds: dict[str, Range]
    bf16_seconds: dict[str, Range]
    host_seconds: dict[str, Range]
    bf16_host_seconds: dict[str, Range]
    at: dict[str, int] = field(default_factory=dict)

    def speed(self, device: Device) -> float:
        """How many times as fast as BF16, halfway between both ends of the time."""
        return 1 / self.over_bf16(device).middle

    def times(self, device: Device) -> tuple[Range, Range]:
        """Seconds of BF16 and of the recipe, each taking as long as its GPU or its host, whichever
        is longer."""
        column = device.column
        bf16 = longest(self.bf16_seconds[column], self.bf16_host_seconds[column])
        return bf16, longest(self.seconds[column], self.host_seconds[column])

    def over_bf16(self, device: Device) -> Range:
        bf16, own = self.times(device)
        return own / bf16

    def plain(self) -> tuple[int | str, int | str, dict[str, dict[str, float]]]:
        """FLOPs, bytes and times for a `report.Row`, on the devices of a report; text where a size
        is symbolic."""
        exact = [self.flops, self.bytes]
        if not self.at:
            exact = [int(n) for n in exact]
        times = {
            d.column: {
                "time": round(1 / self.speed(d), 4),
                "speed": round(self.speed(d), 3),
                **_microseconds("microseconds", self.times(d)[1]),
                **_microseconds("bf16_microseconds", self.times(d)[0]),
                "gpu_microseconds": round(1e6 * self.seconds[d.column].middle, 2),
                "host_microseconds": round(1e6 * self.host_seconds[d.column].middle, 2),
            }
            for d in reported_devices()
        }
        flops, bytes_ = (n if isinstance(n, int) else str(n) for n in exact)
        return flops, bytes_, times


def _microseconds(key: str, seconds: Range) -> dict[str, float]:
    ends = {key: seconds.middle, f"{key}_low": seconds.low, f"{key}_high": seconds.high}
    return {name: round(1e6 * end, 2) for name, end in ends.items()}


def predict(
    recipe: Recipe,
    shape: tuple[Any, ...],
    gemms: Iterable[str] = tuple(GEMMS),
    *,
    cuda_graphs: bool = False,
    devices: tuple[Device, ...] = (),
    **layer: Any,
) -> Prediction | None:
    """The cost of a layer of ``shape`` (T, N, K), or (E, T, N, K) for experts.

    Sizes are ints, SymInts or sympy symbols with hints. A symbolic size is read by its hint,
    without adding a guard: other sizes run in the same graph, though their prediction would differ.
    None if a symbol has no hint, or the layer has no rows.

    cuda_graphs: the host does not launch.  devices: those to predict times for, if not the ones of
    a report.  layer: x_users, w_quantized, bias, x_fuses of a `layer.Layer`.
    """
    devices = devices or reported_devices()
    known = all(isinstance(n, int) for n in shape)
    work = _known if known else _predicted
    traits = tuple(sorted(layer.items()))
    return work(recipe, tuple(shape), tuple(gemms), cuda_graphs, devices, traits)


def _predicted(
    recipe: Recipe,
    shape: tuple[Any, ...],
    gemms: tuple[str, ...],
    cuda_graphs: bool,
    devices: tuple[Device, ...],
    layer: tuple[tuple[str, Any], ...],
) -> Prediction | None:
    experts = shape[0] if len(shape) == 4 else 1
    hints = [hint_of(n) for n in shape[-3:]]
    if None in hints or 0 in hints:
        return None
    t, n, k = map(_expression, shape[-3:])
    symbolic = Layer(t, n, k, experts, grouped=len(shape) == 4, **dict(layer))
    concrete = replace(symbolic, **dict(zip("tnk", hints, strict=True)))
    steps = recipe_steps(recipe, symbolic, gemms)
    each = {
        capability: recipe_steps(recipe, replace(concrete, capability=capability), gemms)
        for capability in {device.capability for device in devices}
    }
    own = {device: each[device.capability] for device in devices}
    bf16 = dict.fromkeys(devices, bf16_steps(concrete, gemms))
    at = {str(n): hint for n, hint in zip(shape[-3:], hints, strict=True) if str(n) != str(hint)}
    return Prediction(
        flops=sum(s.flops for s in steps),
        bytes=sum((s.bits + s.bits_before) / s.shared_by for s in steps) / 8,
        seconds=_gpu(own),
        bf16_seconds=_gpu(bf16),
        host_seconds=_host(own, cuda_graphs),
        bf16_host_seconds=_host(bf16, cuda_graphs),
        at=at,
    )


_known = lru_cache(maxsize=256)(_predicted)  # equal layers have one prediction


def _gpu(steps: dict[Device, list[Step]]) -> dict[str, Range]:
    return {d.column: total(s.seconds(d) for s in own) for d, own in steps.items()}


def _host(steps: dict[Device, list[Step]], cuda_graphs: bool) -> dict[str, Range]:
    if cuda_graphs:
        return dict.fromkeys((d.column for d in steps), Range(0.0, 0.0))
    return {d.column: total(s.host_seconds for s in own) for d, own in steps.items()}


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
