# SPDX-License-Identifier: Apache-2.0
"""torch's estimate of the memory of an FX graph."""

from __future__ import annotations

from torch import fx


def estimated_peak(graph: fx.Graph) -> int:
    """Bytes at the peak of a graph of AOTAutograd, its inputs included, if its nodes run in their
    order and each one writes its result. The inputs called primals are never freed."""
    from torch._inductor.fx_passes.memory_estimator import MemoryTracker

    tracker = MemoryTracker(graph, device_filter=lambda device: True)
    for node in graph.nodes:
        tracker.schedule_node(node)
    return tracker.peak_memory
