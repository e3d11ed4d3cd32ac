# SPDX-License-Identifier: Apache-2.0
"""FSDP1 (FullyShardedDataParallel), which is not supported, on 2 ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import Block, Result, batches, loss_of, new_model, run_scenarios

import q2compile
from q2compile.report import announce, expect
from q2compile.report.report import RunReport, collector


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_step(
    options: dict[str, Any] | None = None, expected: str = "", use_orig_params: bool = True
) -> Result:
    """options: of the backend; None: not compiled. expected: when `expect` is called."""
    handler, report = Lines(), RunReport()
    announce.First.left.clear()
    announce.LOG.addHandler(handler)
    token = collector.set(report) if options is not None and not expected else None
    result = Result()
    try:
        model = new_model()
        if expected == "before":
            q2compile.expect(model)
        sharded: Any = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        if expected == "after":
            q2compile.expect(sharded)
        call = sharded
        if options is not None:
            call = torch.compile(sharded, backend="quartet2", options={"inner": "eager", **options})
        tokens = batches()[0]
        loss_of(call(tokens), tokens).backward()
        if expected:
            expect._say_what_waits_under_fsdp1()  # as it does at exit
    except RuntimeError as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        announce.LOG.removeHandler(handler)
        if token is not None:
            collector.reset(token)
    result.rows = [{"module": row.module, "why": row.why} for row in report.rows]
    result.notes = [*handler.lines, *report.notes]
    return result


SCENARIOS: dict[str, Callable[[], Result]] = {
    "plain": lambda: one_step({}),
    "strict": lambda: one_step({"strict": True}),
    "expected_before": lambda: one_step({}, "before"),
    "expected_after": lambda: one_step({}, "after"),
    "not_compiled": lambda: one_step(None, "before"),
    "flat_parameters": lambda: one_step({}, "before", use_orig_params=False),
}

if __name__ == "__main__":
    run_scenarios(lambda ranks: SCENARIOS)
