# SPDX-License-Identifier: Apache-2.0
"""Inputs for the forward that shows which layers the backend takes: the user's, or made up."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from q2compile.config import Config, resolved_policy
from q2compile.errors import BackendError, ConfigError
from q2compile.tools.batches import all_batches
from q2compile.tools.export.names import is_hugging_face
from q2compile.tools.export.traced import Trace, trace

_ADVICE = (
    "pass example_inputs=, the inputs of the model: a mapping of keyword arguments or a tuple (the "
    "command takes them from FILE.py:FUNCTION)"
)


def traced(
    model: nn.Module,
    config: Config,
    example_inputs: Any,
    calibration: Iterable[Any] | None,
    autocast: torch.dtype | None,
) -> Trace:
    """`trace` with the inputs of the user, or with made-up ones, which have to reach every layer
    that the policy wants."""
    batches = () if calibration is None else all_batches(calibration, "export: calibration")
    calibrates = calibration is not None
    if isinstance(example_inputs, Iterator | DataLoader):
        raise ConfigError(
            f"export: example_inputs: got a {type(example_inputs).__name__}; allowed: one batch, "
            "such as next(iter(...)) of it"
        )
    if example_inputs is not None:
        batches = chain([example_inputs], batches)
    if calibrates or example_inputs is not None:
        return trace(model, config, batches, autocast, activations=calibrates)
    made_up = _made_up(model)
    policy = resolved_policy(config)
    if any(rule.recipe.auto for rule in policy.rules):
        raise ConfigError(
            "export: 'auto' in the policy decides by the sizes of a training batch, which are not "
            f"known; {_ADVICE}"
        )
    try:
        found = trace(model, config, [made_up], autocast, activations=False)
    except BackendError:
        raise
    except Exception as error:  # of the model's code
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"export: {type(model).__name__} can't be called with made-up {', '.join(made_up)} "
            f"({type(error).__name__}: {text}); {_ADVICE}"
        ) from error
    # Weights smaller than a block would have no codes.
    missed = [site for site, row in found.not_seen.items() if min(row.shape[-2:]) >= 16]
    if missed:
        raise ConfigError(
            f"export: made-up inputs ({', '.join(made_up)}) do not reach {len(missed)} "
            f"layer(s) that the policy quantizes, {missed[0]!r} first; {_ADVICE}"
        )
    return found


def _made_up(model: Any) -> dict[str, Tensor]:
    """Tokens and pictures for the forward of a Hugging Face model: one of each, since a classifier
    of sequences may have no padding token. Raises ConfigError for models that take others."""
    found: dict[str, Tensor] = {}
    if is_hugging_face(model):
        takes = inspect.signature(model.forward).parameters
        tokens = {name: t[:1] for name, t in model.dummy_inputs.items() if name in takes}
        if "decoder_input_ids" in takes:
            tokens.setdefault("decoder_input_ids", cast(Tensor, tokens.get("input_ids")))
        found = {name: t for name, t in tokens.items() if t is not None}
        picture = getattr(model.config, "vision_config", model.config)
        size = getattr(picture, "image_size", None)
        if "pixel_values" in takes and isinstance(size, int):
            shape = (1, getattr(picture, "num_channels", 3), size, size)
            found["pixel_values"] = torch.zeros(shape, dtype=model.dtype)
    if not found or model.main_input_name not in found:
        raise ConfigError(
            f"export: a forward must show which layers the backend takes, and what "
            f"{type(model).__name__} is called with is not known; {_ADVICE}"
        )
    device = next(model.parameters()).device
    return {name: t.to(device) for name, t in found.items()}
