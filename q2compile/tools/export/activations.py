# SPDX-License-Identifier: Apache-2.0
"""Static scales of activations, of the largest magnitude seen in training or in calibration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from q2compile.errors import ConfigError
from q2compile.telemetry.read import lines_of
from q2compile.tools.export.ranks import Ranks


def of_telemetry(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Site -> the largest amax of x in fprop that any rank recorded at any step (option
    ``telemetry``, its ``rank*.jsonl``). Raises ConfigError where there is none.
    """
    files = sorted(Path(folder).glob("rank*.jsonl"))
    found: dict[str, float] = {}
    for file in files:
        for row in lines_of(file):
            is_x = (row.get("gemm"), row.get("operand")) == ("fprop", "x")
            if is_x and row.get("amax") is not None:
                found[row["module"]] = max(found.get(row["module"], 0.0), row["amax"])
    if not found:
        raise ConfigError(
            f"export: telemetry: {Path(folder)} has no record of an activation; give the folder "
            "that options={'telemetry': {'to': ...}} wrote, or calibration="
        )
    return {site: torch.tensor(amax) for site, amax in found.items()}


def of_all_ranks(amax: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The largest activations in the calibration batches, over all ranks that export the model.
    They ran different batches, which may have reached different experts."""
    found: dict[str, float] = {}
    for of_rank in ranks.of_each({site: float(value) for site, value in amax.items()}):
        for site, value in of_rank.items():
            found[site] = max(found.get(site, 0.0), value)
    return {site: torch.tensor(value) for site, value in found.items()}
