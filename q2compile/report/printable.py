# SPDX-License-Identifier: Apache-2.0
"""Text for a stdout that may know less than Unicode, where Python's print would raise for "×"."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence

SPELLED = "q2compile.spelled"  # the name of an error handler, as "backslashreplace" is
_SPELLINGS = {"×": "x", "ᵀ": "^T", "⁻": "^-", "¹": "1", "·": "*", "…": "..."}


def printable(text: str) -> str:
    """``text``, in which characters that stdout can't show are spelled out."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, SPELLED).decode(encoding)


def one_line(text: str) -> str:
    """``text`` with its line breaks, tabs and other marks without a shape as Python spells them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def aligned(
    rows: Sequence[Sequence[str]], head: Sequence[str] | None = None, left: int | None = None
) -> list[str]:
    """A table as lines. head: the names of its columns; left: how many columns are aligned to the
    left, by default all."""
    shown = [*([] if head is None else [head]), *rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if head is not None:
        shown.insert(1, ["-" * width for width in widths])
    texts = [
        [
            cell.ljust(width) if left is None or i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in shown
    ]
    return ["  ".join(line).rstrip() for line in texts]


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(_SPELLINGS.get(c, c) for c in error.object[error.start : error.end])
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(SPELLED, _spelled)
