# SPDX-License-Identifier: Apache-2.0
"""A comparison as a picture."""

from __future__ import annotations

from pathlib import Path

from q2compile.recipes.recipe import GEMMS
from q2compile.tools.compare.measurements import Measurements

_MOST = 40  # modules: more can't be read on one page


def draw(c: Measurements, path: str | Path) -> None:
    """Modules worst first: left the share of the gradient's squared error, right each GEMM's own
    relative error."""
    from matplotlib.figure import Figure

    modules = c.ranked[:_MOST]
    figure = Figure(figsize=(11, 1.6 + 0.22 * len(modules)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(modules))
    left.barh(places, [100 * (c.share(m) or 0.0) for m in modules], color="C3")
    left.set_yticks(places, [m.module for m in modules], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("share of the gradient's squared error, %")
    for gemm, marker in zip(GEMMS, "o^s", strict=True):
        points = [(getattr(m, gemm), i) for i, m in enumerate(modules)]
        known = [(error, i) for error, i in points if error is not None]
        if known:
            right.plot(*zip(*known, strict=True), marker, markersize=4, label=gemm)
    right.set_xlabel("relative error of the GEMM alone")
    right.set_xlim(left=0)
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3, axis="x")
    more = f"; the worst {_MOST} of {len(c.modules)}" if len(c.modules) > _MOST else ""
    figure.suptitle(f"{c.recipe} against bf16{more}", fontsize=10)
    figure.savefig(path, dpi=120)
