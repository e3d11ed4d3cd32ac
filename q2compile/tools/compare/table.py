# SPDX-License-Identifier: Apache-2.0
"""A comparison as text."""

from __future__ import annotations

from q2compile.recipes.recipe import GEMMS
from q2compile.tools.compare.measurements import Measurements

_WORDS = {"all": "the whole recipe", **{gemm: f"{gemm} alone" for gemm in GEMMS}}
_MOST = 12  # reasons of matmuls left; a model may have hundreds of one kind


def text(c: Measurements) -> str:
    """Losses, the gradient's error, the modules worst first, and what was left."""
    bf16, own = c.losses["bf16"], c.losses[c.recipe]
    n = len(bf16)
    gap = sum(b - a for a, b in zip(bf16, own, strict=True)) / n
    lines = [
        f"{c.recipe} against bf16, {n} batch{'es' * (n > 1)}: "
        f"loss {sum(bf16) / n:.4f} in bf16, {gap:+.4f} in {c.recipe}",
        "",
        "relative error of the gradient of all parameters",
        *(f"  {_WORDS[run]:18}{sum(e) / len(e):.4f}" for run, e in c.gradients.items()),
        *_all_modules(c),
        "",
        *_modules(c),
    ]
    if c.left:
        reasons: dict[str, list[str]] = {}
        for module, why in c.left.items():
            reasons.setdefault(why, []).append(module)
        lines += ["", f"left as they are: {len(c.left)}"]
        for why, modules in list(reasons.items())[:_MOST]:
            more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            lines.append(f"  {', '.join(modules[:3])}{more}: {why}")
    return "\n".join(lines)


def _all_modules(c: Measurements) -> list[str]:
    """Whether shares can be believed: the first batch's error, and what the effects add up to."""
    if not c.sum_of_effects:
        return []
    return [
        f"  the modules' effects add up to {c.sum_of_effects:.4f} (root of the sum of squares), "
        f"measured on the first batch: {c.gradients['all'][0]:.4f}"
    ]


def _modules(c: Measurements) -> list[str]:
    """One line per module, worst first.

    share: its part of the gradient's squared error; effect: the gradient's error with this module
    alone quantized; fp8: that in FP8; fprop, dgrad, wgrad: each GEMM's own error; gradient: of its
    weight's gradient under the whole recipe.
    """
    head = ["module", "shape", "effect", "fp8", "share", *GEMMS, "gradient", "flops"]
    total = sum(m.flops or 0 for m in c.modules)
    rows = [
        [
            m.module,
            m.shape,
            _number(m.effect),
            _number(m.fp8_effect),
            _percent(c.share(m)),
            *(_number(getattr(m, gemm)) for gemm in GEMMS),
            _number(m.gradient),
            _percent(m.flops / total if m.flops is not None and total else None),
        ]
        for m in c.ranked
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, ["-" * width for width in widths], *rows]
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
