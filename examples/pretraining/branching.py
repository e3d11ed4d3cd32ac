# SPDX-License-Identifier: Apache-2.0
"""Branched runs: every variant goes on from the same BF16 training state of its seed.

Training amplifies small differences most in the steep phase at its start. A branched comparison
trains that phase once per seed, in BF16: the stem. Each variant loads the stem's weights,
optimizer, schedule and generators, sees the batches that follow, and trains to the end of the
schedule. Gaps are paired by stem.

    stems/HASH/checkpoint.pt   the training state after the branch step
    stems/HASH/losses.csv      the stem's own losses
    stems/HASH/stem.json       what defines the stem, and the hash of its weights

A stem is found again by HASH, of what defines it. Two machines can train different weights from one
definition, so runs are paired by the hash of the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pretraining.record import replaced


@dataclass(frozen=True)
class Branch:
    """Where the runs of a comparison leave the stems. step: the last one of a stem."""

    step: int
    stems: Path

    def stem(self, definition: Mapping[str, Any]) -> Stem:
        """The stem of this definition, trained or not."""
        definition = {**definition, "step": self.step}
        text = json.dumps(definition, sort_keys=True)
        return Stem(self.stems / hashlib.sha256(text.encode()).hexdigest()[:16], definition)


@dataclass(frozen=True)
class Stem:
    """One seed's BF16 training state after the branch step."""

    folder: Path
    definition: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def facts(self) -> Path:
        return self.folder / "stem.json"

    @property
    def is_trained(self) -> bool:
        return self.facts.exists()

    def finish(self, weights: Mapping[str, Tensor]) -> None:
        """Write stem.json, which says that the checkpoint is complete."""
        facts = {"weights": hash_of(weights), "definition": self.definition}
        with replaced(self.facts) as file:
            file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @property
    def weights_hash(self) -> str:
        return json.loads(self.facts.read_text(encoding="utf-8"))["weights"]


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """The first 16 hex digits of the SHA-256 of names and values."""
    total = hashlib.sha256()
    for name, value in weights.items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
