# SPDX-License-Identifier: Apache-2.0
"""Which codes of weights, or which scales of theirs, stay for the backward under
recompute_weights="auto"."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from q2compile.passes.live_bytes import LiveBytes, held_outside, storages, worth_time


@dataclass(frozen=True)
class Choice:
    """Whether one weight's codes are saved, and why. scales: the codes are recomputed by saved
    scales."""

    saved: bool
    why: str
    scales: bool = False


@dataclass(frozen=True)
class _Codes:
    """The codes of one weight, or their scales: bytes, and the moments for which keeping them adds
    those."""

    name: str
    bytes: int
    first: int
    last: int


def choose_saved(
    forward: fx.Graph,
    backward: fx.Graph,
    names: Collection[str],
    parameters: Collection[int],
    whole: bool,
    by_scales: Callable[[Collection[str]], Collection[str]] = lambda names: (),
) -> dict[str, Choice]:
    """Whether to save the codes of each weight, decided from the graphs of a step that recomputes
    all of them.

    The rule: save all if that raises the peak of the step by at most 2% or 64 MiB; else save only
    those that do not raise it at all. Saved codes are alive from fprop to dgrad.

    - They raise a peak between the forward and the backward, where all activations are alive.
    - They are free if the peak is at the end of the backward, where all gradients are alive (few
      tokens for the size of the model), or before their fprop or after their dgrad.

    Why not up to BF16's peak: with recomputed codes a step stays below it (0.90 of its peak for an
    8B Llama on an H200, `examples/benchmarks/README.md`), and 4 bits are used to save memory.

    For a graph that holds a part of the model (whole=False) the peak of the step is not known.
    While other graphs run, its saved tensors are alive before its backward, and its gradients after
    it. All codes are saved if they add at most 2% to the saved tensors, or if the saved tensors
    stay below the gradients of its parameters: then the position of the peak among the graphs does
    not matter.

    For codes that are recomputed, scales are saved by the same rule, if the scales are enough.

    names       of the nodes that quantize weights, alike in both graphs
    parameters  which inputs of the forward, and results of the backward, are parameters'
    whole       whether these graphs are all of the step
    by_scales   of names, those for which the scales are enough (`known_by_scales`)
    """
    if not names:
        return {}
    inputs = held_outside(forward)
    held = sum(inputs.values())
    before = LiveBytes(forward, inputs.keys())
    after = LiveBytes(backward, inputs.keys() | held_outside(backward).keys())
    alive = [held + size for size in (*before.alive, *after.alive)]
    codes, scales = [], []
    for node in forward.nodes:
        if node.name in names:
            made = storages(node)
            first = max(before.last_read.get(s, 0) for s in made)
            last = len(before.alive) + after.place[node.name]
            codes.append(_Codes(node.name, sum(made.values()), first, last))
            of_scales = sum(size for output in (1, 2) for size in storages(node, output).values())
            scales.append(_Codes(node.name, of_scales, first, last))
    if whole:
        chosen = _by_peak(alive, codes)
        left = by_scales([name for name, choice in chosen.items() if not choice.saved])
        return _with_scales(chosen, _by_peak(alive, [one for one in scales if one.name in left]))
    results: Any = backward.output_node().args[0]
    gradients = [results[i] for i in parameters if isinstance(results[i], fx.Node)]
    at_end = held + sum(size for node in gradients for size in storages(node).values())
    saved = held + before.alive[-1]
    chosen = _by_saved(saved, at_end, codes)
    left = by_scales([name for name, choice in chosen.items() if not choice.saved])
    return _with_scales(
        chosen, _by_saved(saved, at_end, [one for one in scales if one.name in left])
    )


def _with_scales(chosen: dict[str, Choice], of_scales: dict[str, Choice]) -> dict[str, Choice]:
    for name, choice in of_scales.items():
        if choice.saved:
            chosen[name] = Choice(False, f"{chosen[name].why}; their scales are saved", scales=True)
    return chosen


def _by_peak(alive: list[int], codes: list[_Codes]) -> dict[str, Choice]:
    peak = max(alive)
    change = [0] * (len(alive) + 1)
    for one in codes:
        change[one.first] += one.bytes
        change[one.last] -= one.bytes
    more = max(map(sum, zip(alive, accumulate(change), strict=False))) - peak
    raised = f"{more / peak:.1%}, {more / 2**20:.1f} MiB"
    if more <= worth_time(peak):
        why = f"all codes raise the peak of the step by {raised}"
        return {one.name: Choice(True, why) for one in codes}
    chosen = {}
    for one in sorted(codes, key=lambda c: c.last - c.first):  # those that are alive for less first
        moments = slice(one.first, one.last)
        if max(alive[moments]) + one.bytes <= peak:
            alive[moments] = [size + one.bytes for size in alive[moments]]
            chosen[one.name] = Choice(True, "it does not raise the peak of the step")
        else:
            why = f"it would raise the peak of the step; all codes would, by {raised}"
            chosen[one.name] = Choice(False, why)
    return chosen


def _by_saved(saved: int, at_end: int, codes: list[_Codes]) -> dict[str, Choice]:
    with_codes = saved + sum(one.bytes for one in codes)
    part = "of this part of the model"
    if with_codes <= at_end:
        choice = Choice(True, f"the saved tensors {part} are smaller than its gradients")
    elif with_codes <= 1.02 * saved:
        raised = with_codes / saved - 1
        choice = Choice(True, f"all codes raise the saved tensors {part} by {raised:.1%}")
    else:
        raised = with_codes / saved - 1
        choice = Choice(False, f"all codes would raise the saved tensors {part} by {raised:.1%}")
    return {one.name: choice for one in codes}
