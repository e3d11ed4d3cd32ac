# SPDX-License-Identifier: Apache-2.0
"""`export`: a trained model as an inference checkpoint of the codes that its forward multiplies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from q2compile.backend import quartet2
from q2compile.config import Config
from q2compile.errors import ConfigError, one_of, shown
from q2compile.tools.export import activations as recorded
from q2compile.tools.export.formats import ACTIVATIONS, DYNAMIC, FORMATS, STATIC, Format, format_for
from q2compile.tools.export.job import Exported, Job
from q2compile.tools.export.names import is_hugging_face
from q2compile.tools.export.ranks import on_rank_0
from q2compile.tools.export.shards import checked_folder
from q2compile.tools.export.traced import Trace, trace
from q2compile.tools.export.write import write
from q2compile.torch_internals.dynamo import compile_arguments

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
    max_shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write ``model`` into ``folder`` as an inference checkpoint: the layers that the policy takes
    by the codes that their forward multiplies, bit for bit, everything else as it is.

    Args:
        model: trained, compiled by this backend or not, on any device; also under DDP, FSDP2 or
            tensor parallelism, where every rank calls this and rank 0 writes.
        folder: where to write; must not be there yet, or be empty.
        format: "compressed-tensors", "modelopt", or "safetensors", which holds every recipe.
        activations: "weight-only"; "static", a stored scale for each layer's activations, from
            ``calibration`` or ``telemetry``; "dynamic" where the format knows it (MXFP4).
        options: as for torch.compile. By default those that the model was compiled with.
        example_inputs: what the model is called with, once: a mapping of keyword arguments, a tuple
            of arguments, or one argument. Not needed for transformers' language models.
        autocast: the dtype of training's autocast; torch.float32 for training in fp32 without.
            By default the model runs as this function is called.
        calibration: batches, each as ``example_inputs``, for static scales.
        telemetry: a folder of the option ``telemetry``, for static scales.
        inexact: what to do with a layer whose codes the format can't hold as they are: "raise", or
            "leave" it in the precision of its parameter, which `Exported.left` says.
        tokenizer: a tokenizer or processor to save beside a Hugging Face model.
        max_shard_bytes: size of a file at most.

    Returns what was written, layer by layer, and what was left and why.

    Raises ConfigError, a ValueError, with nothing written: for arguments that can't be used, a
    folder that is not empty, a model whose options or inputs are not known, weights on "meta", no
    taken layer, and under ``inexact="raise"`` for codes that the format can't hold.
    """
    one_of("format of export", format, FORMATS)
    one_of("activations of export", activations, ACTIVATIONS)
    one_of("inexact of export", inexact, ("raise", "leave"))
    path = on_rank_0(lambda: checked_folder(folder))
    if find_spec("safetensors") is None:
        raise ConfigError("export: writing takes the package safetensors: pip install safetensors")
    _check_sources(activations, calibration, telemetry)
    if autocast is not None and autocast not in AUTOCAST:
        raise ConfigError(f"export: autocast: got {shown(autocast)}; allowed: {list(AUTOCAST)}")
    compiled, model = model, _unwrapped(model)
    if meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ConfigError(
            f"export: {len(meta)} parameters are on 'meta' and have no values, {meta[0]!r} first; "
            "load the weights before exporting"
        )
    config = _options(compiled, options)
    amax = recorded.of_telemetry(telemetry) if telemetry is not None else {}
    batches = _batches(model, example_inputs, calibration)
    found = trace(model, config, batches, autocast, activations=calibration is not None)
    fmt = _checked_format(found, format, activations, autocast)
    job = Job(
        model=model,
        path=path,
        fmt=fmt,
        activations=activations,
        found=found,
        amax=amax or recorded.of_all_ranks(found.amax),
        leaves=inexact == "leave",
        tokenizer=tokenizer,
        limit=max_shard_bytes,
    )
    return write(job)


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


def _options(model: nn.Module, options: Mapping[str, Any] | Config | None) -> Config:
    """The options given, or those that the model, or its parts, were compiled with."""
    if options is not None:
        return Config.from_options(options)
    found: list[Config] = []
    for module in model.modules():
        given = compile_arguments(module, quartet2)
        if given is not None:
            config = Config.from_options(given.get("options"), given.get("mode"))
            found += [config] * (config not in found)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"export: parts of the model are compiled with {len(found)} different options; pass "
            "options= with one policy for the whole model"
        )
    raise ConfigError(
        "export: this model is not compiled by the backend quartet2, so its recipe and policy are "
        "not known; pass options=, those of training ({} for the defaults)"
    )


def _batches(model: Any, example_inputs: Any, calibration: Iterable[Any] | None) -> Any:
    """Arguments to call the model with."""
    batches = iter(() if calibration is None else calibration)
    first = list(islice(batches, 1))
    if calibration is not None and not first:
        raise ConfigError("export: calibration has no batch")
    if example_inputs is not None:
        return chain([example_inputs], first, batches)
    if first:
        return chain(first, batches)
    if is_hugging_face(model) and "input_ids" in model.dummy_inputs:
        device = next(model.parameters()).device
        return [{name: t.to(device) for name, t in model.dummy_inputs.items()}]
    raise ConfigError(
        "export: a forward must show which layers the backend takes; pass example_inputs=, the "
        "inputs of the model: a mapping of keyword arguments or a tuple"
    )


def _checked_format(
    found: Trace, name: str, activations: str, autocast: torch.dtype | None
) -> Format:
    """The format's variant for the layers found. Raises ConfigError for what can't be exported."""
    if not found.uses:
        why = "; ".join(f"{site}: {reason}" for site, reason in list(found.left.items())[:3])
        raise ConfigError(
            "export: the policy and the recipe leave no layer with 4-bit codes in its forward"
            f"{' (' + why + ')' if why else ''}. A model whose forward is bf16 is saved as it is, "
            "by save_pretrained or torch.save; to quantize it after training, pass options= with "
            "a recipe whose forward is quantized"
        )
    uses = [use for of_one in found.uses.values() for use in of_one]
    if autocast is None and (full := [u.site for u in uses if u.dtype == torch.float32]):
        raise ConfigError(
            f"export: the forward of {full[0]!r} and {len(full) - 1} more runs in float32 here. "
            "Training under bf16 autocast quantizes the weights as bf16: pass "
            "autocast=torch.bfloat16; or autocast=torch.float32 if it trained in float32"
        )
    fmt = format_for(name, {use.fprop.b.scheme for use in uses})
    if activations not in fmt.activations:
        more = (
            ": their loaders take the global scale of NVFP4 activations from the file; use "
            "'static' or 'weight-only'"
            if activations == DYNAMIC
            else ""
        )
        raise ConfigError(
            f"export: {fmt.name} in {fmt.variant} has no {activations!r} activations; it has "
            f"{', '.join(fmt.activations)}{more}"
        )
    return fmt
