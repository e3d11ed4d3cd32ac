# SPDX-License-Identifier: Apache-2.0
"""How an input's index changes within a piece of the operand: 16 bytes of a row, which a thread
computes at once (expressions.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

ROW, COLUMN = sympy.symbols("r c", integer=True, nonnegative=True)


class CannotFuse(Exception):
    """Why an operand is not computed in the quantizer, in words."""


class Way(NamedTuple):
    """lanes: whether an index counts up within a piece. divisor: a divisor of the index at the
    piece's first column (0: every integer divides it)."""

    lanes: bool
    divisor: int


def way_through(e: sympy.Expr, piece: int) -> Way:
    """The way of an index at row r and columns c to c + piece - 1; c is a multiple of piece.

    Raises:
        CannotFuse: the index does not read along a row.
    """
    if e.is_Integer:
        return Way(False, int(e))
    if e == COLUMN:
        return Way(True, piece)
    if e.is_Symbol:
        return Way(False, 1)
    ways = [way_through(arg, piece) for arg in e.args]
    counting = [way.lanes for way in ways]
    if e.is_Add and sum(counting) <= 1:
        return Way(any(counting), math.gcd(*(way.divisor for way in ways)))
    if not any(counting):
        return Way(False, _divisor(e, ways))
    if isinstance(e, FloorDiv | Mod | PythonMod | ModularIndexing) and not any(counting[1:]):
        return _way_within(e, ways, piece)
    raise CannotFuse(f"a read does not go along a row: {e}")


def _way_within(e: sympy.Expr, ways: list[Way], piece: int) -> Way:
    """The way of a quotient or remainder of a counting index by whole pieces."""
    steps = [int(arg) if arg.is_Integer else 1 for arg in e.args[1:]]
    quotients = steps[:1] if isinstance(e, FloorDiv) else steps[:-1]
    found = ways[0]
    for divisor in quotients:
        if divisor != 1 and (found.divisor % piece or divisor % piece):
            raise CannotFuse(f"a read does not go along a row: {e}")
        if divisor != 1:
            whole = found.divisor % divisor == 0
            found = Way(False, found.divisor // divisor if whole else 1)
    if isinstance(e, FloorDiv) or not found.lanes:
        return found if isinstance(e, FloorDiv) else Way(False, math.gcd(found.divisor, steps[-1]))
    if found.divisor % piece or steps[-1] % piece:
        raise CannotFuse(f"a read does not go along a row: {e}")
    return Way(True, math.gcd(found.divisor, steps[-1]))


def _divisor(e: sympy.Expr, ways: list[Way]) -> int:
    """A divisor of an index without the column."""
    if e.is_Mul:
        return math.prod(way.divisor for way in ways)
    if isinstance(e, FloorDiv) and e.args[1].is_Integer:
        whole = ways[0].divisor % int(e.args[1]) == 0
        return ways[0].divisor // int(e.args[1]) if whole else 1
    return 1
