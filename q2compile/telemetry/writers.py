# SPDX-License-Identifier: Apache-2.0
"""Records in forms that other programs read: CSV and TensorBoard's events."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class CsvFile:
    """A file of records, a header on top, appended to."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, columns
        if not path.exists():
            self._append([dict(zip(columns, columns, strict=True))])

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append records; a number that is not known is an empty cell."""
        self._append(rows)

    def _append(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerows(rows)


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
