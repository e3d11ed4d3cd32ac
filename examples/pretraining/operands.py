# SPDX-License-Identifier: Apache-2.0
"""The error of each operand of each GEMM on a run's own tensors, recipe by recipe.

All recipes start from the weights of one checkpoint and see the same batches. q2compile's telemetry
records the errors of x, w and dy as fprop, dgrad and wgrad multiply them (rotated, requantized),
and for comparison those of a linear whose x, w and dy are N(0,1), as papers state them. The errors
of GEMM results and of the gradient of all parameters come from `q2compile.compare`.

    error of an operand     root of the mean over modules and batches of (|x̂ - x| / |x|)²
    error of a GEMM         root of the mean over modules of (|q - g|² / |g|²), on the same operands
    error of the gradient   |q - g| / |g| of all parameters together, mean over the batches
    share of a kind         of the squared effects of all modules, an effect being the error of the
                            gradient with one module alone quantized (`--alone`)
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import q2compile
from pretraining.model import SIZES, build_model
from pretraining.runs import Run
from q2compile import telemetry

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
NORMAL_SIZE = 2048  # T, N and K of the linear of N(0,1)


@dataclass(frozen=True)
class OperandErrors:
    """The errors of one recipe. Keys of operands and normal are "fprop x" and the like; relative
    errors.

    worst: of the run's operands, the module with the largest error. gemms: of each GEMM's result;
    gradients: of the gradient of all parameters, under the whole recipe and each GEMM alone.
    kinds: o_proj and the like -> its shares of the squared effects and of the FLOPs; with --alone.
    """

    run: str
    operands: dict[str, float] = field(default_factory=dict)
    normal: dict[str, float] = field(default_factory=dict)
    worst: dict[str, tuple[str, float]] = field(default_factory=dict)
    gemms: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The model of a checkpoint of `train`, in training mode, and what it was trained by.

    The checkpoint of a stem (see `branching`) has no run: BF16 trained it.
    """

    model: nn.Module
    step: int
    setup: dict[str, Any]
    run: str

    @classmethod
    def load(cls, file: Path, device: str) -> Trained:
        """Raises ValueError where there is none."""
        if not file.is_file():
            raise ValueError(
                f"--checkpoint {file}: no such file; `train --keep` leaves the last one of a run"
            )
        state = torch.load(file, map_location="cpu", weights_only=True)
        setup = state["setup"]["setup"]
        model: nn.Module = build_model(SIZES[setup["size"]], setup["vocab"], setup["seq"])
        model.load_state_dict(state["model"])
        run = state["setup"].get("run", {"name": "bf16"})
        return cls(model.to(device), state["step"], setup, run["name"])


def measure(
    trained: Trained,
    run: Run,
    batches: Sequence[Tensor],
    device: str,
    inner: str,
    alone: bool = False,
) -> OperandErrors:
    """Everything about one recipe. batches: int64 [B, S] each, on the device."""
    layers = SIZES[trained.setup["size"]].layers
    options = {**run.compile_options(layers), "inner": inner}
    own = of_operands(recorded(trained.model, batches, options, device))
    normal = of_operands(recorded_of_normal(options, device))
    compared = compared_gemms(trained.model, batches, options, device, alone)
    return OperandErrors(
        run=run.name,
        operands={key: rms(errors.values()) for key, errors in own.items()},
        normal={key: rms(errors.values()) for key, errors in normal.items()},
        worst={key: max(errors.items(), key=lambda item: item[1]) for key, errors in own.items()},
        gemms={
            gemm: rms(errors)
            for gemm in GEMMS
            if (errors := [e for m in compared.modules if (e := getattr(m, gemm)) is not None])
        },
        gradients={key: sum(e) / len(e) for key, e in compared.gradients.items()},
        kinds=of_kinds(compared) if alone else {},
    )


def rms(errors: Iterable[float]) -> float:
    errors = list(errors)
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


# -------------------------------------------------------------------------------------- telemetry


def recorded(
    model: nn.Module, batches: Sequence[Tensor], options: Mapping[str, Any], device: str
) -> list[dict[str, Any]]:
    """Telemetry's lines of a forward and backward of each batch; weights stay as they are."""

    def step(compiled: Any, tokens: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()

    return list(lines(model, batches, options, step))


def recorded_of_normal(options: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """The same of a linear in bf16 whose x, w and dy are N(0,1), [T, K], [N, K] and [T, N]."""
    generator = torch.Generator().manual_seed(0)
    size = NORMAL_SIZE

    def normal() -> Tensor:
        return torch.randn(size, size, generator=generator).to(device, torch.bfloat16)

    linear = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(normal())

    def step(compiled: Any, x: Tensor) -> None:
        compiled(x.requires_grad_()).backward(normal())

    return list(lines(nn.Sequential(linear), [normal()], options, step))


def lines(
    model: nn.Module,
    batches: Sequence[Tensor],
    options: Mapping[str, Any],
    step: Callable[[Any, Tensor], None],
) -> Iterator[dict[str, Any]]:
    """Telemetry's records of a step of each batch."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        record = {"every": 1, "to": folder, "tensorboard": False}
        asked: dict[str, Any] = {**options, "telemetry": record}
        compiled: Any = torch.compile(model, backend="quartet2", options=asked)
        for batch in batches:
            model.zero_grad(set_to_none=True)
            step(compiled, batch)
            telemetry.step()
        model.zero_grad(set_to_none=True)
        telemetry.flush()
        for text in (Path(folder) / "rank0.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line.get("relative_error") is not None:
                yield line


def of_operands(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """ "fprop x" -> module -> the root of its mean squared error over the steps."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        place = f"{line['gemm']} {line['operand']}"
        found.setdefault(place, {}).setdefault(line["module"], []).append(line["relative_error"])
    order = [f"{gemm} {operand}" for gemm, operands in GEMMS.items() for operand in operands]
    return {
        place: {module: rms(errors) for module, errors in found[place].items()}
        for place in order
        if place in found
    }


# ---------------------------------------------------------------------------------------- compare


def compared_gemms(
    model: nn.Module,
    batches: Sequence[Tensor],
    options: Mapping[str, Any],
    device: str,
    alone: bool,
) -> q2compile.Comparison:
    others = {key: value for key, value in options.items() if key not in ("recipe", "inner")}
    asked = [{"input_ids": tokens, "labels": tokens} for tokens in batches]
    torch._dynamo.reset()
    with torch.autocast(device, torch.bfloat16):
        return q2compile.compare(model, asked, options["recipe"], options=others, alone=alone)


def of_kinds(compared: q2compile.Comparison) -> dict[str, tuple[float, float]]:
    """The last part of the modules' names -> their shares of the squared effects and the FLOPs."""
    flops = sum(module.flops or 0 for module in compared.modules)
    kinds: dict[str, tuple[float, float]] = {}
    for module in compared.modules:
        kind = module.module.rpartition(".")[2]
        effects, size = kinds.get(kind, (0.0, 0.0))
        share = compared.share(module) or 0.0
        kinds[kind] = (effects + share, size + (module.flops or 0) / flops)
    return kinds


# ------------------------------------------------------------------------------------------ table


def table(found: Sequence[OperandErrors]) -> str:
    """A line a recipe and operand, own tensors beside N(0,1); then GEMMs, gradients, kinds."""
    rows = [["recipe", "operand", "own tensors", "N(0,1)", "worst module", ""]]
    for errors in found:
        for place, error in errors.operands.items():
            module, worst = errors.worst[place]
            normal = errors.normal.get(place)
            beside = "" if normal is None else f"{normal:.4f}"
            rows.append([errors.run, place, f"{error:.4f}", beside, module, f"{worst:.4f}"])
    gemms = [["recipe", *(f"{gemm}'s result" for gemm in GEMMS), "gradient", *GEMMS]]
    for errors in found:
        of_gemms = [number(errors.gemms.get(gemm)) for gemm in GEMMS]
        of_gradients = [number(errors.gradients.get(key)) for key in ("all", *GEMMS)]
        gemms.append([errors.run, *of_gemms, *of_gradients])
    kinds = [["recipe", "modules", "share of the gradient's error", "of the FLOPs", "ratio"]]
    for errors in found:
        for kind, (effect, size) in sorted(errors.kinds.items(), key=lambda k: -k[1][0] / k[1][1]):
            kinds.append([errors.run, kind, f"{effect:.1%}", f"{size:.1%}", f"{effect / size:.2f}"])
    return (
        f"{aligned(rows)}\n\n{aligned(gemms)}\n(gradient: of all parameters, under the whole "
        "recipe and with one GEMM alone quantized)"
        + (f"\n\n{aligned(kinds)}" if len(kinds) > 1 else "")
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def write(found: Sequence[OperandErrors], facts: Mapping[str, Any], file: Path) -> None:
    rows = {**facts, "recipes": [asdict(errors) for errors in found]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
