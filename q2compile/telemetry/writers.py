# SPDX-License-Identifier: Apache-2.0
"""Records in forms that other programs read: CSV and TensorBoard's events."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def append_csv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Append records to a file that has a header; a number that is not known is an empty cell."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


class Tensorboard:
    """Scalars by "statistic/module.gemm.operand", so that TensorBoard has a card for each
    statistic."""

    def __init__(self, writer: Any, fields: Sequence[str]) -> None:
        self._writer, self._fields = writer, fields

    @classmethod
    def where_installed(cls, path: Path, fields: Sequence[str]) -> Tensorboard | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return cls(SummaryWriter(str(path)), fields)

    def write(self, rows: Iterable[dict[str, Any]], finding: Any) -> None:
        for row in rows:
            operand = f"{row['module']}.{row['gemm']}.{row['operand']}"
            for name in self._fields:
                value = row[name]
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(f"{name}/{operand}", value, row["step"])
        if finding is not None:
            self._writer.add_text("nonfinite", str(finding), finding.step)

    def flush(self) -> None:
        self._writer.flush()
