# SPDX-License-Identifier: Apache-2.0
"""A user's file, as type checkers read it: `make lint` runs mypy --strict and pyright on it, over
the package as it is installed. Lines that must be errors have an ignore comment; an ignored line
without an error is an error."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import q2compile

policy: dict[str, q2compile.PolicyValue] = {
    "*lm_head*": "bf16",
    "*.down_proj": {"recipe": "nvfp4", "dgrad": "bf16"},
    "*.up_proj": {"fprop": {"x": {"scheme": "nvfp4_46", "transform": "none"}}},
    "*": "auto",
}
options: q2compile.Options = {
    "recipe": "quartet2",
    "policy": policy,
    "mode": "max-autotune",
    "telemetry": {"every": 10, "modules": ["*mlp*"]},
    "seed": 7,
}
unknown_recipe: q2compile.Options = {"recipe": "quartet3"}  # type: ignore[typeddict-item]
unknown_option: q2compile.Options = {"recipee": "quartet2"}  # type: ignore[typeddict-unknown-key]
unknown_gemm: q2compile.RecipeChange = {"dgrd": "bf16"}  # type: ignore[typeddict-unknown-key]


def train(model: nn.Module, x: torch.Tensor) -> q2compile.Report:
    config = q2compile.Config(recipe="nvfp4", mode="reduce-overhead", dump="graphs/")
    q2compile.Config(mode="fast")  # type: ignore[arg-type]
    q2compile.Config(unknown=True)  # type: ignore[call-arg]
    _ = q2compile.no_such_name  # type: ignore[attr-defined]
    model.compile(backend="quartet2", options=options)
    q2compile.expect(model)
    q2compile.gather_codes(model)
    q2compile.forget_weights()
    q2compile.set_rng_state(q2compile.get_rng_state())
    q2compile.telemetry.step()
    report = q2compile.explain(model, x, options=config)
    assert_type(report.rows[0], q2compile.Row)
    return report


def measure(model: nn.Module, batches: list[torch.Tensor]) -> str:
    compared = q2compile.compare(model, batches, options=options)
    assert_type(compared.ranked[0], q2compile.ModuleError)
    quantized = q2compile.quantize(batches[0], "nvfp4_46")
    assert_type(quantized.dequantize(), torch.Tensor)
    try:
        return q2compile.export(model, "served/").format
    except q2compile.StageError as error:
        return error.stage
    except (q2compile.ConfigError, q2compile.NotTakenError) as error:
        return error.message
