# SPDX-License-Identifier: Apache-2.0
"""The result of `compare`."""

from __future__ import annotations

from pathlib import Path

from q2compile.report.printable import printable
from q2compile.tools.compare.measurements import Measurements
from q2compile.tools.compare.picture import draw
from q2compile.tools.compare.table import text


class Comparison(Measurements):
    """The result of `compare`. Print it to see the table, worst module first."""

    def draw(self, path: str | Path) -> None:
        """Draw the ranking into a file, whose ending says its kind (png, svg, pdf).

        Raises an ImportError if matplotlib is not installed.
        """
        draw(self, path)

    def __str__(self) -> str:
        return printable(text(self))
