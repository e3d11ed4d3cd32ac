# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile export`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from q2compile.config import Config
from q2compile.errors import ConfigError
from q2compile.tools.compare.command import built
from q2compile.tools.export.export import export
from q2compile.tools.export.formats import ACTIVATIONS, FORMATS, STATIC
from q2compile.tools.export.shards import checked_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a checkpoint and prints what was written. Returns the status."""
    parser = argparse.ArgumentParser(
        prog="q2compile export",
        description="A trained checkpoint as one for inference: the layers that the policy takes "
        "by the codes that their forward multiplies, everything else as it is.",
        epilog="Options other than the recipe come from the file that Q2COMPILE_CONFIG names: give "
        "those of training.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder that save_pretrained wrote; or FILE.py:FUNCTION, which returns (model, "
        "batches), the model with its trained weights and batches to call it with",
    )
    parser.add_argument("folder", type=Path, help="where to write; not there yet, or empty")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="compressed-tensors",
        help="default %(default)s",
    )
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default="weight-only",
        help="static takes --telemetry, or the batches of FILE.py:FUNCTION; default %(default)s",
    )
    parser.add_argument("--telemetry", type=Path, help="a folder that training recorded into")
    parser.add_argument("--recipe", help="default: that of Q2COMPILE_CONFIG, or quartet2")
    parser.add_argument(
        "--autocast",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="the dtype of training's forward; default %(default)s",
    )
    parser.add_argument(
        "--inexact",
        choices=("raise", "leave"),
        default="raise",
        help="layers whose codes the format can't hold as they are; default %(default)s",
    )
    arguments = parser.parse_args(argv)
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
