# SPDX-License-Identifier: Apache-2.0
"""A device that is measured: sizes, how calls are timed on it, and the report that is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from q2compile.cost_model.devices import Device, data_sheet
from q2compile.runtime_kernels.kernel_states import REJECTED, NotServedError, lines_of
from q2compile.tools.bench.llama_block import Block
from q2compile.tools.bench.report import FAULT, UNSUPPORTED, BenchRow, Log, Times
from q2compile.tools.bench.timing import (
    CALLS,
    Call,
    captured,
    cpu_microseconds,
    step_times,
    time_in_turns,
)

_ROUNDS = 20


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure. Those for a GPU fill one of today's; those for a CPU show that everything
    works."""

    matrix: tuple[int, int]
    products: tuple[tuple[int, int, int], ...]  # M, N, K
    grouped: tuple[int, int, int, int]  # E, T, N, K
    linear: tuple[int, int, int]  # T, N, K
    block: Block
    host_repeats: int
    host_calls: tuple[int, int]  # in two graphs, of which the second takes longer by the others
    host_linears: tuple[int, int]  # likewise
    steps: int  # of the tiny model
    cpu_seconds: float = 0.05  # of each call that is timed on a CPU


_WEIGHTS = ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
ON_GPU = Sizes(
    matrix=(8192, 4096),
    products=tuple((m, n, k) for n, k in _WEIGHTS for m in (128, 512, 2048, 8192)),
    grouped=(8, 8192, 4096, 2048),
    linear=(8192, 4096, 4096),
    block=Block(width=4096, inner=14336, heads=32, key_values=8, batch=1, length=4096),
    host_repeats=200,
    host_calls=(8, 40),
    host_linears=(4, 12),
    steps=50,
)
ON_CPU = Sizes(
    matrix=(128, 256),
    products=((64, 128, 128),),
    grouped=(2, 256, 128, 128),
    linear=(64, 128, 128),
    block=Block(width=128, inner=256, heads=4, key_values=2, batch=1, length=64),
    host_repeats=15,
    host_calls=(1, 3),
    host_linears=(1, 3),
    steps=3,
)


@dataclass
class Bench:
    """A device, and what was found on it.

    sheet: the cost model's, None where it does not know the device
    log: the report; None writes none
    """

    device: torch.device
    sizes: Sizes
    sheet: Device | None = None
    log: Log | None = None
    group: str = ""

    @classmethod
    def of(cls, device: torch.device, log: Log | None = None, group: str = "") -> Bench:
        if device.type != "cuda":
            return cls(device, ON_CPU, None, log, group)
        sheet = data_sheet(torch.cuda.get_device_name(device))
        return cls(device, ON_GPU, sheet, log, group)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def begun(self, name: str) -> None:
        """Notes what is about to run: the last note is of what hangs or crashes."""
        if self.log is not None:
            self.log.write("begun", group=self.group, name=name)

    def inputs(self, bytes_: int) -> int:
        """The number of operands of so many bytes to alternate: if possible more than an L2 cache
        of today holds, 128 MiB."""
        return min(CALLS, max(2, math.ceil(2**28 / bytes_))) if self.on_gpu else 1

    def times(
        self, calls: Mapping[str, Callable[[], list[Call]]]
    ) -> tuple[dict[str, Times], dict[str, Exception]]:
        """Times of the calls that run, interleaved on a GPU; and the errors of the others."""
        ready: dict[str, Any] = {}
        errors: dict[str, Exception] = {}
        for name, make in calls.items():
            self.begun(name)
            try:
                own = make()
                if self.on_gpu:
                    ready[name] = captured(own)
                else:
                    ready[name] = cpu_microseconds(own[0], self.sizes.cpu_seconds)
            except Exception as error:  # whatever one does, the others are measured
                errors[name] = error
        if self.on_gpu:
            self.begun(f"{len(ready)} of them in turns: {', '.join(ready)}")
            ready = time_in_turns(ready, _ROUNDS)
        return {name: Times.of(found) for name, found in ready.items()}, errors

    def steps(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        """Times of steps that the host launches, interleaved on a GPU."""
        if self.on_gpu:
            found = step_times(calls)
        else:
            found = {n: cpu_microseconds(c, self.sizes.cpu_seconds) for n, c in calls.items()}
        return {name: Times.of(times) for name, times in found.items()}


def timed(row: BenchRow, times: Times | None, error: Exception | None = None) -> BenchRow:
    """A row with its times, or with the reason why there are none."""
    if times is not None:
        row.microseconds, row.minimum, row.p90 = times
    if error is not None:
        failed(row, error)
    return row


def failed(row: BenchRow, error: Exception) -> None:
    """Notes what was raised in place of a result."""
    own = str(error)
    row.why = " ".join(f"{type(error).__name__}: {own}".split())[:500]
    # Anything else than select() of a kernel that does not serve the arguments is a fault.
    fault = not isinstance(error, NotServedError) or error.state == REJECTED
    row.status = FAULT if fault else UNSUPPORTED
    if row.status == FAULT:
        row.more["traceback"] = lines_of(error)
