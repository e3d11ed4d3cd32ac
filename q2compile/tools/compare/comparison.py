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
        """The ranking as a picture, of the kind that the path's ending names (png, svg, pdf).

        Raises ImportError where matplotlib is not installed.
        """
        draw(self, path)

    def __str__(self) -> str:
        return printable(text(self))
