# SPDX-License-Identifier: Apache-2.0
"""Cases instead of the product of their factors: every scheme, and any two properties together.

A rule of rounding is a property of a scheme, and what breaks it is seldom more than two properties
that meet: a format and a dtype, a rounding and a value, a form and a direction. A product of 25
schemes with all else would run each pair many times.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import combinations, product
from typing import Any

from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme, get_scheme


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases of the product of the factors. Each value of a factor is in one of them, and whichever
    two properties meet in the product meet in one of them. Values with the name of a scheme, in any
    form and after any transform ("h32>mxfp4_quest"), have the properties of the scheme; others are
    properties themselves.
    """
    return covering(product(*factors))


def covering(possible: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of these cases, chosen as `pairwise` chooses from a product."""
    cases = [(case, _covered(case)) for case in possible]
    missing = set().union(*(covered for _, covered in cases)) if cases else set()
    chosen = []
    while missing:
        case, covered = max(cases, key=lambda one: len(one[1] & missing))
        chosen.append(case)
        missing -= covered
    return chosen


def _covered(case: tuple[Any, ...]) -> frozenset[Hashable]:
    names, properties = [], []
    for place, value in enumerate(case):
        scheme = _scheme(value)
        if scheme is None:
            properties.append((place, str(value)))
            continue
        names.append((place, scheme.with_form("").name))
        properties += [
            (place, scheme.format, scheme.rounding),
            (place, scheme.global_scale),
            (place, scheme.block),
            (place, scheme.selects, bool(scheme.steps)),
            (place, scheme.form),
        ]
    return frozenset([*names, *properties, *combinations(properties, 2)])


def _scheme(value: Any) -> Scheme | None:
    name = value.rpartition(">")[2] if isinstance(value, str) else ""
    return get_scheme(name) if name.partition("@")[0] in SCHEMES else None
