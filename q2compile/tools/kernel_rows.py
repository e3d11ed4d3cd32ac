# SPDX-License-Identifier: Apache-2.0
"""The kernels of a device as rows of a report, each with its self-check: of `q2compile doctor` and
of `q2compile bench`.

The rows are what the compiler asks for on this device: layers of each published recipe go through
the passes and Inductor's lowering, which generates no code."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from q2compile import lowering
from q2compile.cost_model.layer import layer_graphs
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels import checks, selfcheck
from q2compile.runtime_kernels.check_results import Request, stored
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Group
from q2compile.runtime_kernels.kernel_states import REJECTED, Noted, awaited_in, lines_of, state_of
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.small_calls import Form
from q2compile.torch_internals.inductor import decompositions, lower
from q2compile.torch_internals.patches import patched

# Counts of rows at which kernels take other paths: `q2compile doctor --sweep`.
SWEEP = (1, 15, 16, 17, 127, 128, 129, 1000, 2048, 3072, 4096, *range(64, 2048, 128))
PASSED, SERVES = "passed", "serves"  # beside the three states of kernels that do not run


@dataclass
class KernelRow:
    """The state of a kernel with one scheme; of a quantizer also for one variant.

    state: passed, rejected, unsupported or disabled; "serves" without a check.
    traceback: of the exception that a rejected one raised, if it did; its last lines.
    """

    op: str
    kernel: str
    of: str
    scheme: str
    state: str = SERVES
    reason: str = ""
    milliseconds: int | None = None
    traceback: list[str] = field(default_factory=list, repr=False)
    requests: Sequence[Request] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.of if self.of != self.op else ''}".rstrip()

    def ask(self) -> None:
        """Fills in the state: rejected if one of its forms is, unsupported if all are."""
        reasons: list[Any] = []
        start, self.reason = time.perf_counter(), ""
        for request in self.requests:
            try:
                reasons.append(checks.rejection(request))
            except Exception as error:  # whatever a kernel does, the report goes on
                self.state, self.reason = REJECTED, f"{type(error).__name__}: {error}"
                self.traceback = lines_of(error)
                return
        self.milliseconds = round(1e3 * (time.perf_counter() - start))
        bad = [r for r in reasons if r is not None and state_of(r) == REJECTED]
        if bad or None not in reasons:
            reason = (bad or reasons)[0]
            self.state = state_of(reason)
            self.traceback = getattr(reason, "traceback", [])
            self.reason = " ".join(reason.split()).removeprefix(f"{self.state}: ")
        else:
            self.state = PASSED

    def as_line(self) -> dict[str, Any]:
        """The row as a mapping, for JSON."""
        names = "op", "kernel", "of", "scheme", "state", "reason", "milliseconds"
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        if self.state == SERVES:
            return "serves this device"
        if self.state == PASSED:
            return f"passed ({self.milliseconds} ms)"
        state = f"FAULT, {self.state}" if self.state == REJECTED else self.state
        return f"{state}: {self.reason.removeprefix(f'{self.state} ')}"


def checked_rows(
    rows: Sequence[KernelRow], check: bool, announce: Callable[[KernelRow], None]
) -> Iterator[KernelRow]:
    """Fills in the rows, and yields each when it is done. All checks run anew, in a process of
    their own.

    check: whether checks run.  announce: called with each row before it waits for its check.
    """
    with checks.answering(stored=False) if check else nullcontext():
        serving = [row for row in rows if check and row.state == SERVES]
        with awaited_in({}):
            for row in serving:
                row.ask()
        for row in serving:
            row.state = SERVES
        for row in rows:
            announce(row)
            if check and row.state == SERVES:
                row.ask()
            yield row


def rejected_rows(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """The rows that are rejected by what is stored."""
    found = ((row, map(stored, row.requests)) for row in rows)
    return [row for row, results in found if any(each and each.reason for each in results)]


# Layers of each recipe: of experts or not, with a bias or not, and whether x and dy are computed by
# what an Inductor kernel may be fused with.
_LAYERS = (False, True, False), (False, False, True), (True, False, False)


def device_rows(device: torch.device) -> list[KernelRow]:
    """A row for each self-check that training by a published recipe begins on this device."""
    lowering.register()
    asked = Noted()
    with checks.answering(stored=False), awaited_in(asked), patched():
        for recipe, (grouped, bias, fuses) in product(map(resolve, RECIPES), _LAYERS):
            if all(getattr(recipe, gemm) is None for gemm in GEMMS):
                continue  # torch's own
            how: Any = {"device": device, "decompositions": decompositions(), "fuses": fuses}
            for graph in layer_graphs(recipe, tuple(GEMMS), grouped, bias, **how)[0]:
                lower(graph)
    return sorted(map(row_of, asked.values()), key=lambda row: (row.op, row.kernel))


def row_of(request: Request) -> KernelRow:
    """The row of a self-check."""
    op, kernel, _, what, *_ = request.check
    if isinstance(what, Group):
        words = dict.fromkeys(_words_of(call) for call in what.calls)
        labels, schemes = (" + ".join(dict.fromkeys(each)) for each in zip(*words, strict=True))
        return KernelRow(op, kernel, labels, schemes, requests=[request])
    return KernelRow(op, kernel, *_words_of(what), requests=[request])


def _words_of(form: Form) -> tuple[str, str]:
    """The op or the variant, and the rest."""
    return form.label, str(form).removeprefix(form.label).removeprefix(", ")


def sweep_rows(device: torch.device) -> Iterator[KernelRow]:
    """The GEMMs of a GPU, over counts of rows. A kernel may be wrong at a single one."""
    for row in device_rows(device):
        if row.op == GEMM:
            _, name, _, form = row.requests[0].check
            sizes = [selfcheck.request_of(name, device, form._replace(rows=rows)) for rows in SWEEP]
            row.of, row.requests = f"{row.of} of {len(SWEEP)} sizes", [*row.requests, *sizes]
            yield row
