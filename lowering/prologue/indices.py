# SPDX-License-Identifier: Apache-2.0
"""Indices of a prologue expression, from Inductor's, and how each changes within a piece of the
operand: 16 bytes of a row, which a thread computes at once (expressions.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

ROW, COLUMN = sympy.symbols("r c", integer=True, nonnegative=True)


class CannotFuse(Exception):
    """Why an operand is not computed in the quantizer, in words."""


class Index(NamedTuple):
    """text: as a prologue expression has it. lanes: whether it counts up within a piece. divisor: a
    divisor of the index at the piece's first column (0: every integer divides it)."""

    text: str
    lanes: bool
    divisor: int


def index_of(e: sympy.Expr, piece: int) -> Index:
    """The index at row r and columns c to c + piece - 1; c is a multiple of piece.

    Raises:
        CannotFuse: the index does not read along a row.
    """
    if e.is_Integer:
        return Index(str(e) if e >= 0 else f"({e})", False, int(e))
    if e in (ROW, COLUMN):
        return Index(str(e), e == COLUMN, piece if e == COLUMN else 1)
    if e.is_Symbol:
        raise CannotFuse(f"an index depends on {e}, which is not known")
    parts = [index_of(arg, piece) for arg in e.args]
    counting = [part.lanes for part in parts]
    if e.is_Add and sum(counting) <= 1:
        text = " + ".join(part.text for part in parts)
        return Index(f"({text})", any(counting), math.gcd(*(part.divisor for part in parts)))
    if e.is_Mul and not any(counting):
        text = " * ".join(part.text for part in parts)
        return Index(f"({text})", False, math.prod(part.divisor for part in parts))
    if isinstance(e, FloorDiv):
        return _quotient(parts[0], parts[1], piece)
    if isinstance(e, Mod | PythonMod):
        return _remainder(parts[0], parts[1], piece)
    if isinstance(e, ModularIndexing):
        base, by, modulus = parts
        return _remainder(base if by.text == "1" else _quotient(base, by, piece), modulus, piece)
    raise CannotFuse(f"a read does not go along a row: {e}")


def _quotient(base: Index, by: Index, piece: int) -> Index:
    whole = _is_whole(base, by, piece) and base.divisor % by.divisor == 0
    text = f"floordiv({base.text}, {by.text})"
    return Index(text, False, base.divisor // by.divisor if whole else 1)


def _remainder(base: Index, by: Index, piece: int) -> Index:
    _is_whole(base, by, piece)
    divisor = math.gcd(base.divisor, by.divisor)
    return Index(f"mod({base.text}, {by.text})", base.lanes, divisor)


def _is_whole(base: Index, by: Index, piece: int) -> bool:
    """Whether a divisor is a number. That of a counting index must be one of whole pieces."""
    number = by.text.isdigit()
    pieces = number and base.divisor % piece == by.divisor % piece == 0
    if by.lanes or (base.lanes and not pieces):
        raise CannotFuse(f"a read does not go along a row: {base.text} by {by.text}")
    return number
