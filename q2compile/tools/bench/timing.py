# SPDX-License-Identifier: Apache-2.0
"""Timing: on a GPU by events; calls that are compared are interleaved.

Kernels are captured into CUDA graphs of many calls that alternate over inputs larger than the L2
cache, so neither the host nor the cache is timed. (triton.testing.do_bench would time both: it
clears the cache between calls that the host enqueues one by one.) Without a GPU,
torch.utils.benchmark's timer is used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]
CALLS = 8  # a graph
ROUNDS = 40


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of CALLS of these calls, in turn."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    return graph


def time_in_turns(
    graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds per call, by round."""
    events = []
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        row = {}
        for name, graph in graphs.items():
            row[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            row[name][0].record()
            graph.replay()
            row[name][1].record()
        events.append(row)
    torch.cuda.synchronize()
    return {n: [1e3 * r[n][0].elapsed_time(r[n][1]) / CALLS for r in events] for n in graphs}


def in_turns(steps: Mapping[str, Call], rounds: int = 12, calls: int = 4) -> dict[str, float]:
    """Median milliseconds per call, the steps taking turns; launched by the host, and so as long as
    the longer of the two."""
    times = step_times(steps, rounds, calls)
    return {name: 1e-3 * statistics.median(own) for name, own in times.items()}


def step_times(
    steps: Mapping[str, Call], rounds: int = 12, calls: int = 4
) -> dict[str, list[float]]:
    """Microseconds per call, by round, measured as `in_turns` does."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                step()
            end.record()
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / calls)
    return times


def host_microseconds(call: Call, count: int = 400) -> float:
    """Host time of a call that never waits for the device. Median of 5."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def cpu_microseconds(call: Call, seconds: float) -> list[float]:
    """Times of calls on a CPU, over at least so many seconds, after one warm-up call."""
    call()
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return [1e6 * time for time in timer.blocked_autorange(min_run_time=seconds).times]
