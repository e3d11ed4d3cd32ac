# SPDX-License-Identifier: Apache-2.0
"""Two groups of `q2compile bench` that time nothing: self-checks and hashes of codes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from q2compile.runtime_kernels.cuda import selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import arguments_of, checked_of
from q2compile.runtime_kernels.ops.table import Variant
from q2compile.runtime_kernels.registry import REFERENCE, Kernel, kernels, ops
from q2compile.tools.bench import codes
from q2compile.tools.bench.bench import Bench, failed, unsupported
from q2compile.tools.bench.report import FAULT, PASSED, UNSUPPORTED, Row


def checks(bench: Bench) -> Iterator[Row]:
    """The self-check of every kernel, anew."""
    if not bench.on_gpu:
        why = "no CUDA device: `q2compile doctor` checks the kernels of a CPU"
        yield Row("checks", "all", status=UNSUPPORTED, why=why)
        return
    for op in ops():
        for kernel in kernels(op):
            serves = kernel.name != REFERENCE and kernel.device_type in (None, bench.device.type)
            for of, scheme in checked_of(op) if serves else ():
                yield _check(bench, kernel, of, scheme)


def _check(bench: Bench, kernel: Kernel, of: str | Variant, scheme: str) -> Row:
    name = f"{of} {scheme}"
    bench.begun(f"{name} {kernel.name}")
    row = Row("checks", name, kernel=kernel.name, status=PASSED)
    start = time.perf_counter()
    try:
        arguments = [
            a.to(bench.device) if isinstance(a, torch.Tensor) else a
            for a in arguments_of(of, scheme)
        ]
        why = kernel.why_not(*arguments)
        if why is not None:
            row.status, row.why = unsupported(str(why)), str(why)
            return row
        variant = (of,) if isinstance(of, Variant) else ()
        difference = selfcheck.disagreement(kernel.op, kernel.name, bench.device, scheme, *variant)
        if difference is not None:
            row.status, row.why = FAULT, difference
    except Exception as error:  # whatever a kernel does, the report goes on
        failed(row, error)
    row.more["milliseconds"] = round(1e3 * (time.perf_counter() - start))
    return row


def hashes(bench: Bench) -> Iterator[Row]:
    """The codes of a large matrix by every quantizer of the recipes, which must be those of the
    references on a CPU."""
    shape = codes.SHAPE if bench.on_gpu else codes.SMALL
    expected = codes.shipped(shape)
    for name, make in codes.calls(bench.device, shape):
        bench.begun(name)
        row = Row("codes", name, shape, status=PASSED)
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
