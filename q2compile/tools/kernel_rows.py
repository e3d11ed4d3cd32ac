# SPDX-License-Identifier: Apache-2.0
"""The kernels of a device as rows of a report, each with its self-check: of `q2compile doctor` and
of `q2compile bench`."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from q2compile.lowering.inductor_kernels import selfcheck as inductor_selfcheck
from q2compile.runtime_kernels.choice import Kernel, kernels, ops
from q2compile.runtime_kernels.cuda import checks, selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import (
    CASES,
    FORMS_OF,
    SWEEP,
    arguments_of,
    checked_of,
    op_of,
)
from q2compile.runtime_kernels.cuda.gemm.operands import operand_forms
from q2compile.runtime_kernels.cuda.jit.launch import unsupported
from q2compile.runtime_kernels.cuda.quantize import grouped_check
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Group
from q2compile.runtime_kernels.cuda.quantize.groups_of_recipes import groups_of_recipes
from q2compile.runtime_kernels.kernel_states import REJECTED, awaited_in, lines_of, state_of
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED
from q2compile.runtime_kernels.ops.table import GEMM, QUANTIZE, QuantizerVariant, rowwise_call
from q2compile.runtime_kernels.registry import GROUPED, INDUCTOR, REFERENCE

# The schemes of the recipes' operands for which Inductor kernels are used.
INDUCTOR_CHECKED: tuple[str, ...] = ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16_pow2")
INDUCTOR_CHECKED += ("nvfp4_16x16", "mxfp4_rceil_32x32")
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
    asks: Any = field(default=None, repr=False)  # each: None, or the reason why it does not run

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.of if self.of != self.op else ''}".rstrip()

    def ask(self) -> None:
        """Fills in the state: rejected if one of its forms is, unsupported if all are."""
        start, reasons, self.reason = time.perf_counter(), [], ""
        for ask in self.asks:
            try:
                reasons.append(ask())
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
    with checks.answering(checks.Mode(stored=False, runs=False)):
        for row in rows:
            row.ask()
            if row.state == PASSED:
                row.state = SERVES
    with checks.answering(checks.Mode(stored=False)) if check else nullcontext():
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
    with checks.answering(checks.Mode(runs=False)):
        for row in rows:
            row.ask()
    return [row for row in rows if row.state == REJECTED]


def device_rows(device: torch.device) -> Iterator[KernelRow]:
    """The rows of all kernels but the references; on a GPU also those of Inductor kernels and of
    grouped launches."""
    if device.type == "cuda":
        yield from inductor_rows(device)
    grouped = list(group_rows(device)) if device.type == "cuda" else []
    for op in ops():
        for kernel in kernels(op):
            serves = kernel.name != REFERENCE and kernel.device_type in (None, device.type)
            for of, scheme in checked_of(op) if serves else ():
                yield kernel_row(kernel, device, of, scheme)
        yield from (row for row in grouped if row.op == op)


def inductor_rows(device: torch.device) -> Iterator[KernelRow]:
    for scheme in INDUCTOR_CHECKED:
        yield KernelRow(
            *(QUANTIZE, INDUCTOR, f"Inductor kernel of {QUANTIZE}", scheme),
            asks=[partial(inductor_selfcheck.rejection, device, rowwise_call(scheme))],
        )


def group_rows(device: torch.device) -> Iterator[KernelRow]:
    """Rows of the grouped and batched launches of the recipes' linears."""

    def ask(group: Group) -> str | None:
        return unsupported(device.index) or grouped_check.rejection(group, device)

    for group in groups_of_recipes(operand_forms(torch.cuda.get_device_capability(device))):
        counts = Counter(str(of) for of, _ in group.calls)
        of = " + ".join(f"{n} {name}" if n > 1 else name for name, n in counts.items())
        schemes = " + ".join(dict.fromkeys(scheme for _, scheme in group.calls))
        yield KernelRow(
            *(op_of(group.calls[0][0]), GROUPED, of, schemes),
            asks=[partial(ask, group)],
        )


def sweep_rows(device: torch.device) -> Iterator[KernelRow]:
    """The GEMMs of a GPU, over counts of rows. A kernel may be wrong at a single one."""
    swizzled = operand_forms(torch.cuda.get_device_capability(device))["nvfp4"] == SWIZZLED

    def ask(kernel: Kernel, scheme: str, rows: int) -> str | None:
        form = torch.bfloat16, None, swizzled, rows
        return kernel_row(kernel, device, GEMM, scheme).asks[0]() or selfcheck.rejection(
            GEMM, kernel.name, device.index, scheme, form
        )

    for kernel in (k for k in kernels(GEMM) if k.device_type == device.type):
        for of, scheme in checked_of(GEMM):
            asks = [partial(ask, kernel, scheme, rows) for rows in SWEEP]
            yield KernelRow(GEMM, kernel.name, f"{of} of {len(SWEEP)} sizes", scheme, asks=asks)


def kernel_row(
    kernel: Kernel, device: torch.device, of: str | QuantizerVariant, scheme: str
) -> KernelRow:
    """The rows of a kernel with one scheme; of a GEMM in all its variants."""
    op = op_of(of)
    forms = FORMS_OF.get(op, ())
    calls = [next(CASES[op](scheme, (f,))).arguments for f in forms] or [arguments_of(of, scheme)]

    fakes = [selfcheck.fakes_on(device, arguments) for arguments in calls]
    asks = [partial(kernel.why_not, *arguments) for arguments in fakes]
    return KernelRow(op, kernel.name, str(of), scheme, asks=asks)
