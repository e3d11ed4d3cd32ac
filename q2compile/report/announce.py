# SPDX-License-Identifier: Apache-2.0
"""Messages without a dump or a report: to Python's logging, and to the trace that tlparse reads.

The logger is "q2compile", so ``TORCH_LOGS="q2compile"`` shows it as it shows torch's own. By level:

    WARNING a part that failed and stays in bf16; an option that has no effect; a line for the first
            graph with linears that the policy wants and of which none was taken; at exit, that
            torch.compile was given the backend and no graph came
    INFO    a line for the first graph with matmuls in 4 bits that a process compiles, one for the
            first whose linears are all left because the policy says so, one for what is emulated
            on its GPU, and one if its matmuls are predicted to be slower there than in BF16
    DEBUG   the options in force, a line for every graph, one for every matmul in it, and what each
            pass did

The lines for first graphs are shown even where nobody has configured logging: on stderr, by rank 0.

To silence it: ``TORCH_LOGS="-q2compile"`` as by
``logging.getLogger("q2compile").setLevel("ERROR")``."""

from __future__ import annotations

import atexit
import logging
import re
import sys
from collections.abc import Sequence
from typing import ClassVar

from torch.utils.data import get_worker_info

from q2compile.capture.find_matmuls import UNREAD
from q2compile.config import Config, resolved_policy
from q2compile.cost_model.devices import present_device
from q2compile.cost_model.ranges import over_bf16
from q2compile.passes.record import PassRecord
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row, shape_text
from q2compile.report.slower import is_slower, slower_text
from q2compile.runtime_kernels.cuda.emulated import emulations
from q2compile.torch_internals.dynamo import was_named
from q2compile.torch_internals.ranks import process_rank

LOG = logging.getLogger("q2compile")
_MOST = 3  # names of matmuls that were left; the others are counted
_FORMATS = {"fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4"}


class _Stderr(logging.Handler):
    """A handler for programs that have not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:  # those show it, in their own form
            print(self.format(record), file=sys.stderr)


class First:
    """Whether a graph came in this process, and whether one had matmuls in 4 bits; ``left``: the
    levels of the lines about graphs that had none."""

    came = False
    compiled = False
    left: ClassVar[set[int]] = set()


def graph_came() -> None:
    """The backend was called."""
    First.came = True


def _say_that_no_graph_came() -> None:
    """A module compiled inside another torch.compile runs with the outer backend, and Dynamo tells
    the inner one nothing. At exit it is known. A spawned worker of a DataLoader runs the program's
    module, and no step of it."""
    worker = get_worker_info() is not None
    if not First.came and not worker and was_named("quartet2") and process_rank() == 0:
        _show_if_unconfigured()
        LOG.warning(
            "q2compile: torch.compile was given backend='quartet2', and no graph came to it: "
            "nothing ran in 4 bits. Either what it returned was never called, or it ran inside "
            "another torch.compile, whose backend replaces it, or under torch.compiler.disable, or "
            "FSDP1 (FullyShardedDataParallel, not supported while fully_shard is) wraps the model, "
            "or it was Module.compile of torch's own class, such as nn.Sequential, which compiles "
            "nothing before torch 2.14: torch.compile(model) does"
        )


atexit.register(_say_that_no_graph_came)


def _show_if_unconfigured() -> None:
    """Print to stderr if nobody has configured the logger."""
    if LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)
        if not LOG.handlers:
            LOG.addHandler(_Stderr())


def compiled(title: str, rows: Sequence[Row], config: Config) -> None:
    """Lines about a graph that was rewritten."""
    if not _of_weights(rows):
        return
    if _is_first(rows, config) and process_rank() == 0:
        _show_if_unconfigured()
        LOG.log(_level(rows), "%s", summary(rows))
        on_gpu = any(row.device.startswith("cuda") for row in rows if row.taken)
        for text in [*(emulations() if on_gpu else ()), *slower(rows)]:
            LOG.info("q2compile: %s", text)
    if not LOG.isEnabledFor(logging.DEBUG):
        return
    LOG.debug("%s: %s", title, summary(rows).removeprefix("q2compile: "))
    LOG.debug("%s: options: %s", title, config)
    for row in rows:
        what = f"{row.recipe} ({row.pattern!r})" if row.pattern else row.recipe
        text = what if row.taken else f"left: {row.why}"
        LOG.debug("%s: %s %s %s", title, row.module, shape_text(row), text)


def slower(rows: Sequence[Row]) -> list[str]:
    """Advice, if the matmuls that are taken are predicted to take longer than in BF16 on the
    GPU that is present; [] if they are not, or the GPU is not known."""
    device = present_device()
    taken = [row for row in rows if row.taken]
    if device is None or not all(device.column in row.predicted for row in taken) or not taken:
        return []
    times = [row.predicted[device.column] for row in taken]
    in_fp4 = any(not row.fprop.startswith("fp8") for row in taken)
    text = slower_text(times, device, in_fp4=in_fp4)
    return [f"on this {device.name} {text}"] if is_slower(over_bf16(times)) else []


def _of_weights(rows: Sequence[Row]) -> list[Row]:
    """The matmuls with a parameter; in a graph that has none the linears, whose weights may be
    what another library has put in place of parameters."""
    return [row for row in rows if row.has_parameter] or [r for r in rows if r.spelling == "linear"]


def _level(rows: Sequence[Row]) -> int:
    """The level of the line for a graph: a warning if no matmul was taken of those that the policy
    wants."""
    is_missed = any(row.wanted for row in rows) and not any(row.taken for row in rows)
    return logging.WARNING if is_missed else logging.INFO


def _is_first(rows: Sequence[Row], config: Config) -> bool:
    """Whether the graph is the first in the process that has matmuls in 4 bits, or has none, at its
    level. A config that quantizes nothing at all gets no line."""
    if any(row.taken for row in rows):
        first, First.compiled = not First.compiled, True
        return first
    level = _level(rows)
    first = level not in First.left and resolved_policy(config).quantizes
    First.left.update([level] * first)
    return first


def failed(title: str, rows: Sequence[Row], names: Exception | None) -> None:
    """Warnings about a graph on which q2compile failed in part: matmuls that could not be read, or
    the search for the model's names."""
    for row in rows:
        if row.why.startswith(UNREAD):
            LOG.warning("q2compile: %s: %s stays in bf16: it %s", title, row.module, row.why)
    if names is not None:
        what = f"{type(names).__name__}: {names}"
        text = "q2compile: %s: names are relative to the compiled frame; the model's raised %s"
        LOG.warning(text, title, what)


def passed(title: str, record: PassRecord) -> None:
    """A line about a pass over a graph, if it matched something."""
    if record.matches:
        text = "%s: pass %s on the %s graph: %d matches"
        LOG.debug(text, title, record.name, record.graph, record.matches)


def summary(rows: Sequence[Row]) -> str:
    """ "q2compile: 56 of 57 matmuls in NVFP4 (quartet2); left: lm_head (policy)". Matmuls of two
    activations, such as attention's, are not counted."""
    rows = _of_weights(rows)
    taken = [row for row in rows if row.taken]
    text = f"q2compile: {len(taken)} of {len(rows)} matmuls"
    if taken:
        gemms = " ".join(getattr(row, gemm) for row in taken for gemm in GEMMS)
        formats = [word for name, word in _FORMATS.items() if name in gemms]
        recipes = dict.fromkeys(row.recipe for row in taken)
        text += f" in {' and '.join(formats)} ({', '.join(recipes)})"
    else:
        text += " quantized"
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.taken:
            reasons.setdefault(re.split(r"[:;,]", row.why, maxsplit=1)[0], []).append(row.module)
    left = []
    for why, names in reasons.items():
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        left.append(f"{', '.join(names[:_MOST])}{more} ({why})")
    return f"{text}; left: {', '.join(left)}" if left else text
