# SPDX-License-Identifier: Apache-2.0
"""Two groups of `q2compile bench` that time nothing: self-checks and hashes of codes."""

from __future__ import annotations

from collections.abc import Iterator

from q2compile.runtime_kernels.kernel_states import REJECTED
from q2compile.tools.bench import codes
from q2compile.tools.bench.bench import Bench, failed
from q2compile.tools.bench.report import FAULT, PASSED, UNSUPPORTED, BenchRow
from q2compile.tools.kernel_rows import checked_rows, device_rows


def checks(bench: Bench) -> Iterator[BenchRow]:
    """The self-check of every kernel, anew, in a process of its own: one that traps or hangs does
    not hide the others."""
    if not bench.on_gpu:
        why = "no CUDA device: `q2compile doctor` checks the kernels of a CPU"
        yield BenchRow("checks", "all", status=UNSUPPORTED, why=why)
        return
    rows = list(device_rows(bench.device))
    for found in checked_rows(rows, True, lambda row: bench.begun(f"{row.name} {row.scheme}")):
        status = {PASSED: PASSED, REJECTED: FAULT}.get(found.state, UNSUPPORTED)
        name = f"{found.of} {found.scheme}"
        row = BenchRow("checks", name, status=status, kernel=found.kernel, why=found.reason)
        row.more = {"milliseconds": found.milliseconds}
        if found.traceback:
            row.more["traceback"] = found.traceback
        yield row


def hashes(bench: Bench) -> Iterator[BenchRow]:
    """The codes of a large matrix by every quantizer of the recipes, which must be those of the
    references on a CPU."""
    shape = codes.SHAPE if bench.on_gpu else codes.SMALL
    expected = codes.shipped(shape)
    for name, make in codes.calls(bench.device, shape):
        bench.begun(name)
        row = BenchRow("codes", name, shape, status=PASSED)
        try:
            call = make()
            row.kernel = codes.kernel_of(call)
            found = codes.hashes(call)
            row.why = codes.differences(found, expected[name])
            if row.why:
                row.status, row.more = FAULT, {"hashes": found}
        except Exception as error:
            failed(row, error)
        yield row
