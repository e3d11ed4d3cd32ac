# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile tables`."""

from __future__ import annotations

import platform
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from q2compile.errors import ConfigError
from q2compile.tools.paper_tables import output
from q2compile.tools.paper_tables.gradients import measure_concentration, measure_layer
from q2compile.tools.paper_tables.schemes import measure_requantized, measure_schemes


@dataclass(frozen=True)
class Effort:
    """samples: rows and columns for each scheme; draws: of each recipe's gradients."""

    samples: int
    draws: int


DEFAULT = Effort(samples=2048, draws=256)
FULL = Effort(samples=4096, draws=4096)


def run(arguments: Namespace) -> int:
    """Measures, prints and writes every table. Returns the exit status."""
    effort = FULL if arguments.full else DEFAULT
    device, scale = _device(arguments.device), arguments.global_scale
    arguments.out.mkdir(parents=True, exist_ok=True)  # fails early if it can't be written
    start = time.monotonic()

    schemes = measure_schemes(effort.samples, device)
    print(output.scheme_table(schemes), end="\n\n", flush=True)
    requantized = measure_requantized(effort.samples // 4, device)
    print(output.requantized_table(requantized), end="\n\n", flush=True)
    layer = measure_layer(scale, effort.samples // 4, device)
    print(output.layer_table(layer), end="\n\n", flush=True)
    concentration = measure_concentration(scale, effort.draws, device, progress=_progress)
    print(output.concentration_table(concentration), end="\n\n")

    tables: dict[str, Sequence[Any]] = {
        "schemes": schemes,
        "requantized": requantized,
        "layer": layer,
        "concentration": concentration,
    }
    about = {
        **asdict(effort),
        "global_scale": scale,
        "device": platform.machine() if device == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start, 1),
    }
    paths = output.write(arguments.out, tables, about)
    png = arguments.out / "concentration.png"
    if output.plot(png, concentration):
        paths.append(png)
    else:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    print(f"{about['seconds']} s, wrote " + ", ".join(str(p) for p in paths))
    return 0


def _device(name: str) -> str:
    """``name``, if tables can be measured there: "cpu", or a CUDA device that this machine has."""
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count()
    if name == "cpu" or kind == "cuda" and (index or "0") in map(str, range(count)):
        return name
    raise ConfigError(
        f"--device: got {name!r}; allowed: cpu, and cuda or cuda:<index>, of which there are "
        f"{count} here"
    )


def _progress(recipe: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[Kmean gradient: {recipe}\r", end="", file=sys.stderr, flush=True)
