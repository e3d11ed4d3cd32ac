# SPDX-License-Identifier: Apache-2.0
"""`export`: a trained model as an inference checkpoint of the codes that its forward multiplies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from q2compile.config import Config
from q2compile.errors import ConfigError, one_of, shown
from q2compile.telemetry.read import largest_inputs
from q2compile.tools.export.formats import (
    ACTIVATIONS,
    DYNAMIC,
    FORMATS,
    STATIC,
    Format,
    formats_for,
)
from q2compile.tools.export.inputs import traced
from q2compile.tools.export.job import Exported
from q2compile.tools.export.options import compiled_parts, options_of_training
from q2compile.tools.export.ranks import Ranks
from q2compile.tools.export.shards import checked_folder, size_in_bytes
from q2compile.tools.export.traced import Trace
from q2compile.tools.export.write import Writer

AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    format: str = "compressed-tensors",
    activations: str = "weight-only",
    options: Mapping[str, Any] | Config | None = None,
    example_inputs: Any = None,
    autocast: torch.dtype | None = None,
    calibration: Iterable[Any] | None = None,
    telemetry: str | os.PathLike[str] | None = None,
    inexact: str = "raise",
    tokenizer: Any = None,
    max_shard_bytes: int | str = "5GB",
) -> Exported:
    """Write ``model`` into ``folder`` as an inference checkpoint: the layers that the policy takes
    as the codes that their forward multiplies, bit for bit, and everything else as it is.

    Args:
        model: a trained model on any device, compiled by this backend or not. Under DDP, FSDP2 or
            tensor parallelism every rank calls this function, and the first rank that names
            ``folder`` writes. Each pipeline stage needs a folder of its own.
        folder: the folder to write, which must be empty or not exist yet.
        format: "compressed-tensors", "modelopt", or "safetensors", which holds every recipe.
        activations: "weight-only"; "static", with a stored scale for each layer's activations, from
            ``calibration`` or ``telemetry``; "dynamic" if the format has it (MXFP4, FP8).
        options: the options of the training, as for torch.compile. By default they are those that
            the model was compiled with in this process, by itself or in a function, or else those
            in the file that Q2COMPILE_CONFIG names. If only parts were compiled, the rest is left.
        example_inputs: the inputs for one call of the model: a mapping of keyword arguments, a
            tuple of arguments, or one argument. Models of transformers that take only tokens and
            pictures do not need it.
        autocast: the dtype of the autocast in training; torch.float32 for training in fp32 without
            autocast. By default the model runs under the autocast of the caller.
        calibration: batches for static scales, each in the form of ``example_inputs``.
        telemetry: a folder of the option ``telemetry``, for static scales.
        inexact: what to do with a layer whose codes the format can't hold exactly: "raise" an
            error, or "leave" the layer in the precision of its parameter (see `Exported.left`).
        tokenizer: a tokenizer or processor to save beside a Hugging Face model.
        max_shard_bytes: the largest size of a file: a number of bytes, or "5GB", "500MB", "2GiB".

    Returns what was written, layer by layer, and what was left and why.

    Raises ConfigError, a ValueError, and writes nothing if an argument can't be used, if the folder
    is not empty, if the model's options or inputs are not known, if weights are on "meta", if no
    layer is taken, or, with ``inexact="raise"``, if the format can't hold some codes.
    """
    one_of("format of export", format, FORMATS)
    one_of("activations of export", activations, ACTIVATIONS)
    one_of("inexact of export", inexact, ("raise", "leave"))
    limit = size_in_bytes(max_shard_bytes)
    compiled, model = model, _unwrapped(model)
    ranks = Ranks(folder, model)
    path = ranks.on_first(lambda: checked_folder(folder))
    if find_spec("safetensors") is None:
        raise ConfigError("export: writing needs safetensors: pip install safetensors")
    _check_sources(activations, calibration, telemetry)
    _check_model(model, autocast)
    config = options_of_training(compiled, options)
    recorded = {} if telemetry is None else _recorded(Path(telemetry))
    found = traced(model, config, example_inputs, calibration, autocast)
    if options is None and (parts := compiled_parts(compiled)):
        found.leave_outside_of(parts)
    formats = _checked_formats(found, format, activations, autocast)
    seen = {site: float(amax) for site, amax in found.amax.items()}
    return Writer(
        model=model,
        done=Exported(str(path), format, "", activations, left=dict(found.left)),
        ranks=ranks,
        formats=formats,
        found=found,
        amax=recorded or ranks.largest(seen),
        leaves=inexact == "leave",
        tokenizer=tokenizer,
        limit=limit,
    ).write()


def _recorded(folder: Path) -> dict[str, float]:
    """Site -> the largest activation in the records of the option ``telemetry``."""
    if not (found := largest_inputs(folder)):
        raise ConfigError(
            f"export: telemetry: {folder} has no record of an activation; give the folder that "
            "options={'telemetry': {'to': ...}} wrote, or calibration="
        )
    return found


def _check_model(model: nn.Module, autocast: torch.dtype | None) -> None:
    if autocast is not None and autocast not in AUTOCAST:
        raise ConfigError(f"export: autocast: got {shown(autocast)}; allowed: {list(AUTOCAST)}")
    if meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ConfigError(
            f"export: {len(meta)} parameters are on 'meta' and have no values, {meta[0]!r} first; "
            "load the weights before exporting"
        )


def _check_sources(activations: str, calibration: Any, telemetry: Any) -> None:
    given = [
        n for n, v in (("calibration", calibration), ("telemetry", telemetry)) if v is not None
    ]
    if activations == STATIC and len(given) != 1:
        raise ConfigError(
            f"export: activations='static' takes its scales from one of calibration= (batches) and "
            f"telemetry= (a folder that training recorded); got {' and '.join(given) or 'neither'}"
        )
    if activations != STATIC and given:
        raise ConfigError(f"export: {given[0]}= is for activations='static'; got {activations!r}")


def _unwrapped(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"export: model: got {shown(model)}; allowed: a torch.nn.Module")
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        is_ddp = isinstance(model, DistributedDataParallel)
        model = model.module if is_ddp else model._orig_mod
    if not any(True for _ in model.parameters()):
        raise ConfigError("export: the model has no parameters")
    return model


def _checked_formats(
    found: Trace, name: str, activations: str, autocast: torch.dtype | None
) -> dict[str, Format]:
    """The format's variants for the layers found. Raises ConfigError for what can't be exported."""
    if not found.uses:
        left = {**found.left, **{site: row.why for site, row in found.not_seen.items()}}
        why = "; ".join(f"{site}: {reason}" for site, reason in list(left.items())[:3])
        raise ConfigError(
            "export: the policy and the recipe leave no layer with codes in its forward"
            f"{' (' + why + ')' if why else ''}. A model whose forward is bf16 is saved as it is, "
            "by save_pretrained or torch.save; to quantize it after training, pass options= with "
            "a recipe whose forward is quantized"
        )
    uses = [use for of_one in found.uses.values() for use in of_one]
    if autocast is None and (full := [u.site for u in uses if u.dtype == torch.float32]):
        raise ConfigError(
            f"export: the forward of {full[0]!r} and {len(full) - 1} more runs in float32 here. "
            "Training under bf16 autocast quantizes the weights as bf16: pass "
            "autocast=torch.bfloat16, or autocast=torch.float32 if it trained in float32"
        )
    formats = formats_for(name, {use.fprop.b.scheme for use in uses})
    if lacking := [fmt for fmt in formats.values() if activations not in fmt.activations]:
        more = (
            ": their loaders take the global scale of NVFP4 activations from the file; use "
            "'static' or 'weight-only'"
            if activations == DYNAMIC
            else ""
        )
        raise ConfigError(
            f"export: {name} in {lacking[0].variant} has no {activations!r} activations; it has "
            f"{', '.join(lacking[0].activations)}{more}"
        )
    return formats
