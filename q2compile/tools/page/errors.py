# SPDX-License-Identifier: Apache-2.0
"""How far the errors of a run's matmuls are from those of Gaussian data, and whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from q2compile.recipes.recipe import GEMMS, Gemm, Operand
from q2compile.runtime_kernels.ops.gaussian import gaussian_error

Data = Mapping[str, Any]
# An error so many times Gaussian data's comes of outliers, which take the range of their blocks.
OUTLIERS = 1.25


@dataclass(frozen=True)
class Error:
    """A relative error, and the one that the scheme makes on N(0, 1).

    what   "dy of wgrad" of an operand, "wgrad" of a GEMM's result
    step   of the record; None from a comparison
    """

    module: str
    gemm: str
    what: str
    error: float
    gaussian: float
    step: int | None = None

    @property
    def ratio(self) -> float:
        return self.error / self.gaussian

    def to_json(self) -> dict[str, Any]:
        own = {"what": self.what, "error": self.error, "gaussian": round(self.gaussian, 4)}
        high = self.ratio >= OUTLIERS
        return {"ratio": round(self.ratio, 4), "high": high, **own, "step": self.step}


def operand_errors(telemetry: Data | None) -> list[Error]:
    """The last recorded error of each operand on each rank; the worst first."""
    operands = telemetry["operands"] if telemetry else ()
    errors = [
        Error(
            *(o["module"], o["gemm"], f"{o['operand']} of {o['gemm']}"),
            *(o["last"]["relative_error"], o["gaussian"], o["last"]["step"]),
        )
        for o in operands
        if o["last"] and o["gaussian"]
    ]
    return sorted(errors, key=lambda e: -e.ratio)


def gemm_errors(comparison: Data | None, rows: Iterable[Data]) -> list[Error]:
    """The error of each GEMM's result, on operands of the bf16 run, from a comparison under a
    recipe of the rows' matmuls. The worst first."""
    errors = []
    by_module = {row["module"]: row for row in rows if row["taken"]}
    for module in comparison["modules"] if comparison else ():
        row = by_module.get(module["module"])
        for gemm in GEMMS:
            gaussian = gaussian_of_gemm(row, gemm) if row else None
            if gaussian and module[gemm] is not None:
                errors.append(Error(module["module"], gemm, gemm, module[gemm], gaussian))
    return sorted(errors, key=lambda e: -e.ratio)


def gaussian_of_gemm(row: Data, gemm: str) -> float | None:
    """Relative error of a GEMM's result on independent Gaussian operands: the squares of the
    roundings add up. None for a GEMM in bf16."""
    squares = [gaussian_error(operand.scheme) for operand in _rounded(row, gemm)]
    if not squares or None in squares:
        return None
    return sum(e**2 for e in squares if e is not None) ** 0.5


def _rounded(row: Data, gemm: str) -> Iterator[Operand]:
    """Each rounding on the way to a GEMM's operands: one that is made of fprop's codes was rounded
    for fprop before."""
    own, fprop = Gemm.parse(row[gemm]), Gemm.parse(row["fprop"])
    if own is None:
        return
    for role, operand in zip(GEMMS[gemm], (own.a, own.b), strict=True):
        yield operand
        if operand.requantized and fprop is not None:
            yield fprop.a if role == "x" else fprop.b


def worst_by_module(errors: Sequence[Error]) -> dict[str, Error]:
    """The worst of each module, of errors in order."""
    worst: dict[str, Error] = {}
    for error in errors:
        worst.setdefault(error.module, error)
    return worst


def shares(comparison: Data | None) -> dict[str, float]:
    """Module -> its share of the gradient's squared error."""
    modules = comparison["modules"] if comparison else ()
    return {m["module"]: m["share"] for m in modules if m["share"] is not None}
