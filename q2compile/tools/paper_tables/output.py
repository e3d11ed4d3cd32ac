# SPDX-License-Identifier: Apache-2.0
"""Tables as text, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from q2compile.tools.paper_tables import paper
from q2compile.tools.paper_tables.gradients import ConcentrationRow, LayerRow
from q2compile.tools.paper_tables.schemes import RequantizedRow, SchemeRow


def scheme_table(rows: Sequence[SchemeRow]) -> str:
    """Quadratic error, effective bits and alignment of each scheme, beside the papers'."""
    lines = [
        "Schemes on N(0,1): relative quadratic error, effective bits, alignment <x, Q(x)>/<x, x>",
        f"{'':22}{'error':>8}{'paper':>8}{'differs':>9}{'bits':>9}{'paper':>8}{'differs':>9}"
        f"{'floor':>8}{'align':>9}{'stored':>8}",
        f"{'scheme':22}{'x 1e-3':>8}{'':8}{'':9}{'':9}{'':8}{'':9}{'(code)':>8}{'':9}{'bits':>8}",
    ]
    for r in rows:
        bits = None if r.paper_bits is None else r.bits - r.paper_bits
        lines.append(
            f"{r.scheme:22}{r.error * 1e3:8.2f}"
            + _cell(r.paper_error, 8, lambda v: f"{v * 1e3:.1f}")
            + _cell(r.difference, 9, lambda v: f"{v:+.1%}")
            + f"{r.bits:9.3f}"
            + _cell(r.paper_bits, 8, lambda v: f"{v:.3f}")
            + _cell(bits, 9, lambda v: f"{v:+.3f}")
            + _cell(r.floor_bits, 8, lambda v: f">{v:.2f}")
            + f"{r.alignment:9.4f}{r.stored_bits:8.3f}"
        )
    return "\n".join(lines)


def requantized_table(rows: Sequence[RequantizedRow]) -> str:
    """requantize against the long way round."""
    lines = [
        "Requantized, against quantizing the transposed dequantized tensor with the same seed",
        f"{'':36}{'bits':>7}{'floor':>8}{'error x 1e-3':>15}{'the long way':>15}",
    ]
    for r in rows:
        bits = "equal" if math.isinf(r.bits) else f"{r.bits:.2f}"
        errors = f"{1e3 * r.error:15.2f}{1e3 * r.error_of_long_way:15.2f}"
        path = f"{r.source} -> {r.scheme}"
        lines.append(f"{path:36}{bits:>7}{'>' + str(r.floor_bits):>8}{errors}")
    return "\n".join(lines)


def layer_table(rows: Sequence[LayerRow]) -> str:
    """One linear layer, one draw."""
    lines = [
        "One linear layer, one draw, effective bits: y against x wᵀ; the gradients against those",
        "of the recipe's own quantized forward, and against those of x wᵀ",
        f"{'recipe':28}{'y':>7}{'floor':>8}{'dx':>8}{'dw':>7}{'dx of xwᵀ':>12}{'dw of xwᵀ':>11}",
    ]
    for r in rows:
        floor = paper.FORWARD_FLOOR if r.recipe == "quartet2" else None
        lines.append(
            f"{r.recipe:28}"
            + (f"{r.y:7.2f}" if math.isfinite(r.y) else f"{'exact':>7}")
            + _cell(floor, 8, lambda v: f">{v:.1f}")
            + f"{r.dx:8.2f}{r.dw:7.2f}{r.dx_unquantized:12.2f}{r.dw_unquantized:11.2f}"
        )
    return "\n".join(lines)


def concentration_table(rows: Sequence[ConcentrationRow]) -> str:
    """Effective bits of the mean gradient; an unbiased recipe gains 1 bit with every 4x draws."""
    draws = sorted({r.draws for r in rows})
    lines = [
        "Mean gradient of n draws, 3-layer MLP of width 256, effective bits for W1 / W2 / W3.",
        "Without bias the error falls as 1/n: +1 bit a column. Floors: Quartet II's own tests.",
        f"{'recipe':28}" + "".join(f"{f'n = {n}':>18}" for n in draws) + f"{'last gain':>20}",
    ]
    for name in dict.fromkeys(r.recipe for r in rows):
        by_draws = {r.draws: r.bits for r in rows if r.recipe == name}
        line = f"{name:28}" + "".join(f"{_triple(by_draws[n]):>18}" for n in draws)
        if len(draws) > 1:
            last, before = by_draws[draws[-1]], by_draws[draws[-2]]
            gains = " / ".join(f"{b - a:+.2f}" for a, b in zip(before, last, strict=True))
            line += f"{gains:>22}"
        lines.append(line)
        if name == "quartet2":
            floors = [paper.CONCENTRATION_FLOORS.get(n) for n in draws]
            lines.append(
                f"{'  floor':28}" + "".join(f"{_triple(f) if f else '':>18}" for f in floors)
            )
            lines.append(
                f"{'  above the floor':28}"
                + "".join(
                    f"{_above(by_draws[n], f) if f else '':>18}"
                    for n, f in zip(draws, floors, strict=True)
                )
            )
    return "\n".join(lines)


def _cell(value: float | None, width: int, text: Any) -> str:
    return f"{'' if value is None else text(value):>{width}}"


def _triple(bits: Sequence[float]) -> str:
    return " / ".join(f"{b:.1f}" for b in bits)


def _above(bits: Sequence[float], floors: Sequence[float]) -> str:
    return " / ".join(f"{b - f:+.1f}" for b, f in zip(bits, floors, strict=True))


def write(folder: Path, tables: dict[str, Sequence[Any]], about: dict[str, Any]) -> list[Path]:
    """One CSV a table and one tables.json with all of them and what they were measured with."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in tables.items():
        records = [_flat(asdict(r)) for r in rows]
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
        paths.append(path)
    everything = {"about": about, **{n: [asdict(r) for r in rows] for n, rows in tables.items()}}
    path = folder / "tables.json"
    path.write_text(json.dumps(_finite(everything), indent=1) + "\n", encoding="utf-8")
    return [*paths, path]


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """The tuple of bits as columns W1, W2, W3."""
    bits = record.pop("bits") if isinstance(record.get("bits"), tuple) else ()
    return {**record, **{f"W{i}": b for i, b in enumerate(bits, 1)}}


def _finite(value: Any) -> Any:
    """JSON has no infinity: the bits of an exact result become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, rows: Sequence[ConcentrationRow]) -> bool:
    """The concentration curves as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    names = list(dict.fromkeys(r.recipe for r in rows))
    for i, axis in enumerate(axes):
        for name in names:
            points = [(r.draws, 4.0 ** -r.bits[i]) for r in rows if r.recipe == name]
            style = "--" if "," in name else "-"
            axis.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        draws = sorted({r.draws for r in rows})
        first = max(4.0 ** -r.bits[i] for r in rows if r.draws == draws[0])
        axis.loglog(draws, [1.5 * first / n for n in draws], "k:", label="1 / draws")
        axis.set_title(f"W{i + 1}")
        axis.set_xlabel("draws averaged")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative quadratic error of the mean gradient")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True
