"""Strict choice among names, with an error a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from q2compile.errors import ConfigError


def one_of(what: str, got: object, allowed: Collection[str]) -> str:
    """``got`` if it is one of ``allowed``.

    Raises ValueError saying what came, the nearest right name and what is allowed (up to 24 names).
    """
    if isinstance(got, str) and got in allowed:
        return got
    near = difflib.get_close_matches(str(got), list(allowed), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = list(allowed)[:24]
    more = f" and {len(allowed) - len(shown)} more" if len(allowed) > len(shown) else ""
    raise ConfigError(f"unknown {what} {got!r}{hint} Allowed: {', '.join(shown)}{more}.")
