# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile export`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from q2compile.config import is_config_file_named
from q2compile.errors import ConfigError
from q2compile.tools.export.export import export
from q2compile.tools.export.formats import STATIC
from q2compile.tools.export.options import options_not_known
from q2compile.tools.export.shards import checked_folder
from q2compile.tools.given import built, given_options

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
