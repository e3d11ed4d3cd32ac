# SPDX-License-Identifier: Apache-2.0
"""Whether the codes of weights stay for the backward under recompute_weights="auto"."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from q2compile.graph.storages import SMALL, WORTH_TIME, bytes_of
from q2compile.torch_internals.memory import estimated_peak


@dataclass(frozen=True)
class SavedChoice:
    """Whether the codes of a graph's weights are saved, and why."""

    saved: bool
    why: str


def choose_saved(
    forward: fx.Graph,
    backward: fx.Graph,
    names: Collection[str],
    parameters: Collection[int],
    whole: bool,
) -> SavedChoice:
    """Whether to save the codes of all weights, decided from the graphs of a step that recomputes
    them.

    The rule: save them if that raises the peak of the step by at most 2%, or by 64 MiB. A step has
    two peaks. One is at the end of the forward, where all activations are alive, and saved codes
    raise it. The other is at the end of the backward, where all gradients of parameters are alive,
    and the codes are not any more. It is the higher one if there are few tokens for the size of the
    model. The first is torch's own estimate of the forward, which counts each element-wise
    operation as written.

    Why not up to BF16's peak: with recomputed codes a step stays below it (0.90 of its peak for an
    8B Llama on an H200, `examples/benchmarks/README.md`), and 4 bits are used to save memory.

    A graph that holds a part of the model has the same two peaks in proportion. There the 64 MiB do
    not count, because each part would take them.

    names       of the nodes that quantize weights, alike in both graphs
    parameters  which inputs of the forward, and results of the backward, are parameters'
    whole       whether these graphs are all of the step
    """
    results: Any = backward.output_node().args[0]
    gradients = [results[i] for i in parameters if isinstance(results[i], fx.Node)]
    codes = bytes_of(node for node in forward.nodes if node.name in names)
    end = bytes_of([*forward.find_nodes(op="placeholder"), *gradients])
    middle = estimated_peak(forward)
    peak = max(middle, end)
    more = max(middle + codes - peak, 0)
    saved = more <= max(WORTH_TIME * peak, SMALL if whole else 0)
    verb, part = "raises" if saved else "would raise", "" if whole else "this part of "
    raised = f"{more / peak:.1%}, {more / 2**20:.1f} MiB"
    return SavedChoice(saved, f"saving all codes {verb} the peak of {part}the step by {raised}")
