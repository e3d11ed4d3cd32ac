# SPDX-License-Identifier: Apache-2.0
"""One matmul of a report, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from q2compile.cost_model.ranges import over_bf16
from q2compile.recipes.recipe import Gemm

# Columns of the text table; those of the devices with predictions stand before "why".
COLUMNS = ("module", "shape", "taken", "recipe", "fprop", "dgrad", "wgrad", "saved", "why")


@dataclass
class Row:
    """One matmul of a report.

    module        absolute module name, or <node> for a matmul without a parameter
    shape         (T, N, K) of y[T, N] = x[T, K] wᵀ, or the output's shape where there is no weight;
                  T may be a symbol
    spelling      how the model wrote it
    taken, why    whether it was rewritten, and why not; ``wanted``: whether the policy asked for it
    recipe        the recipe's name; ``pattern`` is the policy's line that chose it, "" the default
    fprop, dgrad, wgrad   the text of each GEMM's operands (`recipes`), or "bf16"
    kernels       GEMM -> the kernels that run it on ``device`` in ``dtype``
    saved_bytes   bytes that this matmul saves for the backward. An operand that matmuls share (x of
                  q, k, v) counts once, for the first. None until a graph with a backward was
                  compiled. ``saved_elements`` is the number of elements in them
    weight        what happens to the codes of w between fprop and dgrad: "saved" or "recomputed",
                  and why. "" if dgrad uses none, or if that is not known yet
    gathered      "gathers codes", or "gathers values" and why, if ranks gather w, by FSDP2 under
                  `gather_codes` or in the graph; else ""
    rounded       GEMMs that are not exact for all of their MXFP4 operands, and where; else ""
    flops, bytes  those of the layer with its recipe; text if a size is symbolic
    predicted     device -> {"time": divided by BF16's, "speed": the inverse, "microseconds",
                  "bf16_microseconds", "gpu_microseconds", "host_microseconds"}, from data sheets
                  (`cost_model`), for the quantizers and GEMMs only. "microseconds" is the longer of
                  the GPU's and the host's. All are halfway between the ends of what is known:
                  "microseconds_low" over "bf16_microseconds_low", and likewise "_high"
    graph         number of the compiled graph; None for a linear that never reached the backend
    calls         GEMM -> op -> how often this matmul would call it if nothing were shared
    scope         the module whose code has the matmul, if there is no parameter to name it
    measured      {"device", "microseconds", "bf16_microseconds"} if it was timed, else {}
    training      whether its graph was compiled for training, and not under no_grad
    served        equal modules that Dynamo runs with the same graph; they have no rows of their own
    model         a number for each model in the report
    source        [file, line, code] of the matmul in the model's source; [] where it is not known
    """

    module: str
    shape: tuple[Any, ...]
    spelling: str = "linear"
    taken: bool = False
    wanted: bool = False
    why: str = ""
    recipe: str = "bf16"
    pattern: str = ""
    fprop: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    dtype: str = ""
    device: str = ""
    kernels: dict[str, str] = field(default_factory=dict)
    saved_bytes: int | None = None
    saved_elements: int | None = None
    weight: str = ""
    gathered: str = ""
    rounded: str = ""
    flops: int | str | None = None
    bytes: int | str | None = None
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    graph: int | None = None
    seed_index: int | None = None
    has_parameter: bool = True
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    scope: str = ""
    source: list[Any] = field(default_factory=list)
    training: bool = True
    served: list[str] = field(default_factory=list)
    model: int = 0

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict would copy symbols
        row["shape"] = [n if isinstance(n, int) else str(n) for n in self.shape]
        return row


def shape_text(row: Row) -> str:
    """ "T×N×K" for a matmul with a weight, the output's shape otherwise."""
    return "×".join(str(n) for n in row.shape)


def saved_text(row: Row) -> str:
    """Bytes saved for the backward, and bits per element. "w recomputed": the codes of w are not
    among them. "+ x": x itself is saved too, since the recipe's wgrad takes it in high precision.
    """
    if row.saved_bytes is None:
        return ""
    text = f"{row.saved_bytes} B"
    if row.saved_elements:
        text += f", {8 * row.saved_bytes / row.saved_elements:.2f} bit"
    if row.weight.startswith("recomputed"):
        text += ", w recomputed"
    wgrad = Gemm.parse(row.wgrad)
    return text if wgrad is not None and wgrad.b.source != "fresh" else f"{text} + x"


def cells(row: Row) -> dict[str, str]:
    """A row as text, by column of `COLUMNS`."""
    gemms = {g: getattr(row, g) if row.taken else "" for g in ("fprop", "dgrad", "wgrad")}
    return {
        **dict.fromkeys(COLUMNS, ""),
        "module": row.module,
        "shape": shape_text(row),
        "taken": "yes" if row.taken else "no",
        "recipe": row.recipe if row.taken else "",
        **gemms,
        "saved": saved_text(row),
        **{name: over_bf16([times]).text() for name, times in row.predicted.items()},
        "why": row.why or "; ".join(filter(None, (row.gathered, row.rounded))),
    }
