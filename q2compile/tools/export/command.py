# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile export`."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config
from q2compile.errors import ConfigError
from q2compile.tools.compare.command import built
from q2compile.tools.export.export import export
from q2compile.tools.export.formats import STATIC
from q2compile.tools.export.shards import checked_folder


def run(arguments: Namespace) -> int:
    """Exports a checkpoint and prints what was written. Returns the status."""
    checked_folder(arguments.folder)  # before the model is loaded
    model, batches, tokenizer = _loaded(arguments.checkpoint)
    calibrates = arguments.activations == STATIC and arguments.telemetry is None
    exported = export(
        model,
        arguments.folder,
        format=arguments.format,
        activations=arguments.activations,
        options=Config.from_options(
            {} if arguments.recipe is None else {"recipe": arguments.recipe}
        ),
        example_inputs=None if batches is None or calibrates else next(iter(batches)),
        autocast=getattr(torch, arguments.autocast),
        calibration=batches if calibrates else None,
        telemetry=arguments.telemetry,
        inexact=arguments.inexact,
        tokenizer=tokenizer,
    )
    print(exported)
    return 0


def _loaded(checkpoint: str) -> tuple[torch.nn.Module, Any, Any]:
    """A model, its batches and its tokenizer; None for what there is not."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        model, batches, _ = built(checkpoint)
        if not any(True for _ in islice(iter(batches), 1)):
            raise ConfigError(f"{checkpoint} returned no batch")
        return model, batches, None
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json; allowed: a folder that save_pretrained wrote, or "
            "FILE.py:FUNCTION for any other model"
        )
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{folder}: loading it takes transformers") from None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return (
        model,
        None,
        transformers.AutoTokenizer.from_pretrained(folder) if has_tokenizer else None,
    )
