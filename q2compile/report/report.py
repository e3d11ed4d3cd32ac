# SPDX-License-Identifier: Apache-2.0
"""The report: one row for every matmul, taken or not and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from q2compile.cost_model.devices import ASSUMPTIONS, shown_devices
from q2compile.cost_model.ranges import over_bf16
from q2compile.report.graph_record import GraphRecord
from q2compile.report.model_rows import layers, of_model
from q2compile.report.printable import aligned, one_line, printable
from q2compile.report.row import COLUMNS, Row, cells
from q2compile.report.run_facts import RunFacts
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda.emulated import emulations
from q2compile.runtime_kernels.registry import left_out

if TYPE_CHECKING:
    from q2compile.report.model_coverage import Coverage


class RunReport:
    """Rows and notes of everything compiled while it collected.

    Printing it gives ``text()``, the table. ``to_json()`` is the list of rows as plain mappings.
    Linears of the model that no graph has held so far are rows too.
    """

    def __init__(self) -> None:
        self.compiled_rows: list[Row] = []
        self.graphs = 0
        self.on_change: Callable[[], None] = lambda: None  # called when it has something new
        self.faults: list[str] = []
        self.graph_files: dict[int, dict[str, str]] = {}  # number -> what its dump would hold
        self.run = RunFacts()
        self._coverages: list[Coverage] = []
        self.by_root: Any = WeakIdKeyDictionary()  # for `Coverage.of`
        self._models: Any = WeakIdKeyDictionary()  # model -> its number
        self._closed: tuple[list[Row], list[str]] | None = None

    def add(self, rows: list[Row], coverage: Coverage) -> None:
        """The rows of one more compiled graph."""
        root = coverage.root()
        number = self._models.setdefault(root, len(self._models)) if root is not None else 0
        for row in rows:
            row.model = number
        self.compiled_rows += rows
        self.graphs += 1
        self.add_coverage(coverage)

    def new_graph(self, number: int) -> GraphRecord:
        """The stages of a graph, for the page."""
        files: dict[str, str] = {}
        self.graph_files[number] = files
        return GraphRecord(number, files.__setitem__)

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
        # Parts of one model that have options of their own know the same linears.
        not_seen: dict[Any, Row] = {}
        for coverage in self._coverages:
            for row in coverage.not_seen():
                first = not_seen.setdefault((id(coverage.root()), row.module), row)
                first.wanted |= row.wanted
        return [*self.compiled_rows, *not_seen.values()]

    @property
    def notes(self) -> list[str]:
        if self._closed is not None:
            return self._closed[1]
        # The graphs of one function know the same models, and say the same of them.
        known = dict.fromkeys(note for c in self._coverages for note in c.notes())
        on_gpu = any(row.device.startswith("cuda") for row in self.rows)
        notes = [*left_out(), *(emulations() if on_gpu else ()), *build.reasons(), *known]
        return [*self.faults, *notes, *_predictions(of_model(row.to_json() for row in self.rows))]

    def close(self) -> None:
        """Nothing more will come: keep what is known of the model, which may go away."""
        self._closed = self.rows, self.notes

    def to_json(self) -> list[dict[str, Any]]:
        return [row.to_json() for row in self.rows]

    def summary(self) -> str:
        rows = of_model(self.to_json())
        weights = [row for row in layers(rows) if row["has_parameter"]]
        taken = sum(row["taken"] for row in weights)
        products = len(layers(rows)) - len(weights)
        text = (
            f"{taken} of {_counted(len(weights), 'matmul')} with a weight taken; "
            f"{_counted(products, 'matmul')} without one; {_counted(self.graphs, 'graph')}"
        )
        size, elements = (
            sum(row[f"saved_{what}"] or 0 for row in rows) for what in ("bytes", "elements")
        )
        if not elements:
            return text
        bits = 8 * size / elements
        return f"{text}; quantized for backward: {size} B, {bits:.2f} bits per element"

    def text(self) -> str:
        """The text table, as a dump holds it."""
        notes = [f"note: {n}" for n in self.notes]
        return "\n".join([table(self.rows), "", self.summary(), *notes])

    def __str__(self) -> str:
        return printable(self.text())


def _counted(count: int, one: str) -> str:
    return f"{count} {one}{'s' * (count != 1)}"


# The report that explain() is collecting into, if any.
collector: ContextVar[RunReport | None] = ContextVar("q2compile_report", default=None)


def _predictions(rows: list[dict[str, Any]]) -> list[str]:
    """The predicted time of all that is taken, and its assumptions; [] without a prediction."""
    predicted = [row for row in rows if row["predicted"]]
    taken = [row["predicted"] for row in predicted if row["taken"]]
    notes = [ASSUMPTIONS] if predicted else []
    if taken:
        devices = shown_devices(taken)
        of_bf16 = [
            f"{over_bf16(times[device.column] for times in taken).text()} on {device.name}"
            for device in devices
        ]
        columns = " and ".join(device.column for device in devices)
        notes.insert(
            0,
            "predicted time of the GEMMs taken and their quantizers (not of a step), divided by "
            f"BF16's: {', '.join(of_bf16)}; for each matmul in the columns {columns}",
        )
    return notes


def table(rows: Iterable[Row]) -> str:
    """A text table. The GEMMs' texts are long and repeat, so each distinct recipe is spelt out
    below.
    """
    rows = list(rows)
    devices = [device.column for device in shown_devices(row.predicted for row in rows)]
    shown = [c for c in COLUMNS if c not in ("fprop", "dgrad", "wgrad", "why")] + [*devices, "why"]
    body, recipes = [], []
    for row in rows:
        text = cells(row)
        body.append([one_line(text.get(c, "")) for c in shown])
        if row.taken:
            recipes.append((row.recipe, row.fprop, row.dgrad, row.wgrad))
    lines = aligned(body, shown)
    for name, *gemms in dict.fromkeys(recipes):
        lines += ["", f"recipe {name}"]
        lines += [f"  {g}  {t}" for g, t in zip(("fprop", "dgrad", "wgrad"), gemms, strict=True)]
    return "\n".join(lines)
