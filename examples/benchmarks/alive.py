# SPDX-License-Identifier: Apache-2.0
"""Memory alive at the peak of a step, by the line of generated code that allocated it."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

GIB = 2**30
SHOWN = 20  # lines


def measured(step: Callable[[], Any]) -> dict[str, Any]:
    """The peak of a step that has run before, on the current CUDA device, and what makes it. GiB.

    peak     allocated at most, by the allocator's own count
    before   of that, allocated before the step: parameters, and what other code left behind
    alive    the largest of what the step itself had allocated at the peak, by `lines`
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    largest = sorted(lines(trace).items(), key=lambda row: -row[1])[:SHOWN]
    alive = {line: round(size / GIB, 3) for line, size in largest}
    return {"peak": round(peak / GIB, 3), "before": round(before / GIB, 3), "alive": alive}


def lines(trace: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes alive at the peak of an allocator's trace, of those that it allocated, by the line that
    did. What was there before the trace counts only in that it may be freed.

    trace: `device_traces` of torch.cuda.memory's snapshot: mappings with an action, an addr, a size
        and frames, innermost first.
    """
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    at_peak: dict[int, tuple[int, str]] = {}
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], _line(event["frames"])
            now += event["size"]
            if now > most:
                most, at_peak = now, dict(alive)
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
            now -= event["size"]
    found: dict[str, int] = {}
    for size, line in at_peak.values():
        found[line] = found.get(line, 0) + size
    return found


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The line of Inductor's code among the frames, if there is one; else the innermost."""
    frames = list(frames)
    generated = [frame for frame in frames if "torchinductor" in frame["filename"]]
    for frame in (generated or frames)[:1]:
        text = linecache.getline(frame["filename"], frame["line"]).strip()
        return f"{frame['name']}:{frame['line']} {text}"[:120]
    return "no Python"
