# SPDX-License-Identifier: Apache-2.0
"""`export`: a trained model as an inference checkpoint of the codes that its forward multiplies.
And the command of that name."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from q2compile.capture.module_tree import unwrapped
from q2compile.config import Config, is_config_file_named
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
from q2compile.tools.export.options import compiled_parts, options_not_known, options_of_training
from q2compile.tools.export.ranks import Ranks
from q2compile.tools.export.shards import checked_folder, size_in_bytes
from q2compile.tools.export.traced import Trace, traced
from q2compile.tools.export.write import Exported, Writer
from q2compile.tools.given import built, given_options

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
    compiled, model = model, _checked_model(model)
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


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"export: model: got {shown(model)}; allowed: a torch.nn.Module")
    model = unwrapped(model)
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


_ALLOWED = (
    "allowed: a folder that save_pretrained wrote, or FILE.py:FUNCTION, a function that returns "
    "(model, batches), for any other model"
)
# The files of processors of pictures and sound. Loading one takes libraries of its own.
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def run(arguments: Namespace) -> int:
    """Exports a checkpoint and prints what was written. Returns the status."""
    # Mistakes are reported before the model is loaded.
    options = given_options(arguments) or None
    checked_folder(arguments.folder)
    checkpoint = arguments.checkpoint
    if ":" in checkpoint and not Path(checkpoint).is_dir():
        model, batches, _ = built(checkpoint)
        beside = None
    else:
        known = options is not None or is_config_file_named()
        model, beside = _loaded(Path(checkpoint), known)
        batches = None
    calibrates = arguments.activations == STATIC and arguments.telemetry is None
    exported = export(
        model,
        arguments.folder,
        format=arguments.format,
        activations=arguments.activations,
        options=options,
        example_inputs=None if batches is None or calibrates else next(batches),
        autocast=getattr(torch, arguments.autocast),
        calibration=batches if calibrates else None,
        telemetry=arguments.telemetry,
        inexact=arguments.inexact,
        tokenizer=beside,
    )
    print(exported)
    return 0


class _Beside:
    """The tokenizer and the processor of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
        files = [folder / name for name in _PROCESSORS]
        self._files = {file.name: file.read_bytes() for file in files if file.is_file()}

    def save_pretrained(self, folder: Path) -> None:
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)


def _loaded(folder: Path, options_known: bool) -> tuple[torch.nn.Module, _Beside]:
    """The model in a folder that save_pretrained wrote, by the class that was saved, and what
    belongs to it.

    Raises ConfigError for a folder that does not hold exactly the weights of that class, since
    transformers would make up the ones that are missing; unless ``options_known``, it raises what
    `options_not_known` says before it reads any weights.
    """
    _check(folder)
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{folder}: to load it, pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = _class_of(config, transformers, folder)
        if not options_known:
            with torch.device("meta"):
                raise options_not_known(kind(config))
        model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:500]
        raise ConfigError(f"{folder}: transformers can't load it: {text}") from error
    for what, names in info.items():
        if names:
            first = ", ".join(str(n) for n in sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"{folder}: its weights are not those of {kind.__name__}, which its config.json "
                f"names; transformers reports {what.replace('_', ' ')}: {first}{more}. Save the "
                "model again with its own class, or give FILE.py:FUNCTION, which builds it"
            )
    return model, _Beside(folder)


def _check(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{folder}: {what}; {_ALLOWED}")
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        why = "; it holds an adapter: merge it into its model and save that" if adapter else ""
        raise ConfigError(f"{folder} has no config.json{why}; {_ALLOWED}")


def _class_of(config: Any, transformers: Any, folder: Path) -> Any:
    """The class of transformers that a checkpoint was saved from."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{folder}: it is quantized already; give the checkpoint of the training")
    names = [name.removeprefix("FSDP") for name in config.architectures or ()]
    found = getattr(transformers, names[0], None) if len(names) == 1 else None
    if found is None:
        raise ConfigError(
            f"{folder}: its config.json names the classes {names}, and transformers has to have "
            "exactly one of that name; give FILE.py:FUNCTION, which builds the model"
        )
    return found
