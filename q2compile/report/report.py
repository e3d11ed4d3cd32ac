"""The report: one row for every matmul, taken or not and why."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q2compile import cost
from q2compile.recipes import Gemm

if TYPE_CHECKING:
    from q2compile.coverage import Coverage

_DEVICES = tuple(device.column for device in cost.DEVICES)
COLUMNS = (
    "module",
    "shape",
    "taken",
    "recipe",
    "fprop",
    "dgrad",
    "wgrad",
    "saved",
    *_DEVICES,
    "why",
)


@dataclass
class Row:
    """One matmul.

    module        absolute module name, or <node> for a matmul without a parameter
    shape         (T, N, K) of y[T, N] = x[T, K] wᵀ, or the output's shape where there is no weight;
                  T may be a symbol
    spelling      how the model wrote it
    taken, why    whether it was rewritten, and why not; ``wanted``: whether the policy asked for it
    recipe        the recipe's name; ``pattern`` is the policy's line that chose it, "" the default
    fprop, dgrad, wgrad   what each GEMM is computed in (`recipes`), "bf16" where it is left
    kernels       GEMM -> the kernels that run it on ``device`` in ``dtype``
    saved_bytes   what is kept for backward, summed over the tensors of this matmul; operands shared
                  by several matmuls (x of q, k, v) count once, for the first. None until a graph
                  with a backward was compiled. ``saved_elements``: how many numbers they stand for
    flops, bytes  of the layer under its recipe; text where a size is symbolic
    predicted     device -> {"speed": times as fast as BF16, "microseconds", "bf16_microseconds"},
                  by data sheet (`cost`)
    graph         number of the compiled graph; None for a linear that never reached the backend
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
    flops: int | str | None = None
    bytes: int | str | None = None
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    graph: int | None = None
    salt: int | None = None
    has_parameter: bool = True

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict would copy symbols
        row["shape"] = [n if isinstance(n, int) else str(n) for n in self.shape]
        return row


class Report:
    """Rows and notes of everything compiled while it collected.

    Printing it gives the text table. ``to_json()`` is the list of rows as plain mappings,
    ``to_html(path)`` writes a page. Linears of the model that no graph has held so far are rows
    too.
    """

    def __init__(self) -> None:
        self.compiled_rows: list[Row] = []
        self.graphs = 0
        self.faults: list[str] = []
        self._coverages: list[Coverage] = []
        self._closed: tuple[list[Row], list[str]] | None = None

    def add(self, rows: list[Row], coverage: Coverage) -> None:
        """The rows of one more compiled graph."""
        self.compiled_rows += rows
        self.graphs += 1
        self.add_coverage(coverage)

    def remove(self, rows: list[Row]) -> None:
        """Undo `add` for a graph that is not used after all."""
        if rows:
            self.compiled_rows = [r for r in self.compiled_rows if all(r is not x for x in rows)]
            self.graphs -= 1

    def add_coverage(self, coverage: Coverage) -> None:
        """A model whose linears belong into the report, whether a graph holds them or not."""
        if not any(coverage is c for c in self._coverages):
            self._coverages.append(coverage)

    @property
    def rows(self) -> list[Row]:
        if self._closed is not None:
            return self._closed[0]
        return self.compiled_rows + [row for c in self._coverages for row in c.not_seen()]

    @property
    def notes(self) -> list[str]:
        if self._closed is not None:
            return self._closed[1]
        notes = self.faults + [note for c in self._coverages for note in c.notes()]
        return notes + _predictions(self.rows)

    def close(self) -> None:
        """Nothing more will come: keep what is known of the model, which may go away."""
        self._closed = self.rows, self.notes

    def to_json(self) -> list[dict[str, Any]]:
        return [row.to_json() for row in self.rows]

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one HTML page; written to ``path`` when given. Returns the page."""
        from q2compile.html import report_page

        page = report_page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def summary(self) -> str:
        rows = self.rows
        weights = sum(r.has_parameter for r in rows)
        text = (
            f"{sum(r.taken for r in rows)} of {weights} matmuls with a weight taken; "
            f"{len(rows) - weights} matmuls without one; {self.graphs} graph(s)"
        )
        size, elements = (
            sum(getattr(r, f"saved_{what}") or 0 for r in rows) for what in ("bytes", "elements")
        )
        if not elements:
            return text
        return f"{text}; quantised for backward: {size} B, {8 * size / elements:.2f} bit an element"

    def __str__(self) -> str:
        notes = [f"note: {n}" for n in self.notes]
        return "\n".join([*_table(self.rows), "", self.summary(), *notes])


# The report that explain() is collecting into, if any.
collector: ContextVar[Report | None] = ContextVar("q2compile_report", default=None)


def shape_text(row: Row) -> str:
    """ "T×N×K" for a matmul with a weight, the output's shape otherwise."""
    return "×".join(str(n) for n in row.shape)


def saved_text(row: Row) -> str:
    """Bytes kept for backward, bits for each element they stand for, and "+ x" where the recipe's
    wgrad takes x in high precision, so that x itself is kept too."""
    if row.saved_bytes is None:
        return ""
    text = f"{row.saved_bytes} B"
    if row.saved_elements:
        text += f", {8 * row.saved_bytes / row.saved_elements:.2f} bit"
    wgrad = Gemm.parse(row.wgrad)
    return text if wgrad is not None and wgrad.b.source != "fresh" else f"{text} + x"


def _predictions(rows: list[Row]) -> list[str]:
    """The predicted gain over all that is taken, and what it stands on; [] without a prediction."""
    predicted = [row for row in rows if row.predicted]
    taken = [row.predicted for row in predicted if row.taken]
    notes = [cost.ASSUMPTIONS] if predicted else []
    if taken:
        speeds = []
        for device in cost.DEVICES:
            bf16, own = (
                sum(times[device.column][key] for times in taken)
                for key in ("bf16_microseconds", "microseconds")
            )
            speeds.append(f"{bf16 / own:.2f}x of BF16 on {device.name}")
        notes.insert(0, f"predicted for the matmuls taken together: {', '.join(speeds)}")
    return notes


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
        **{name: f"{of['speed']:.2f}x" for name, of in row.predicted.items()},
        "why": row.why,
    }


def _table(rows: Iterable[Row]) -> list[str]:
    """A text table. The GEMMs' texts are long and repeat, so each distinct recipe is spelt out
    below.
    """
    shown = [c for c in COLUMNS if c not in ("fprop", "dgrad", "wgrad")]
    body, recipes = [], []
    for row in rows:
        text = cells(row)
        body.append([text[c] for c in shown])
        if row.taken:
            recipes.append((row.recipe, row.fprop, row.dgrad, row.wgrad))
    widths = [max(len(line[i]) for line in [list(shown), *body]) for i in range(len(shown))]
    lines = [
        "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
        for line in [list(shown), ["-" * w for w in widths], *body]
    ]
    for name, *gemms in dict.fromkeys(recipes):
        lines += ["", f"recipe {name}"]
        lines += [f"  {g}  {t}" for g, t in zip(("fprop", "dgrad", "wgrad"), gemms, strict=True)]
    return lines
