# SPDX-License-Identifier: Apache-2.0
"""Times of matmuls beside BF16's, as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from q2compile.cost_model.devices import Device
from q2compile.cost_model.ranges import Range, own_and_bf16
from q2compile.report.slower import is_slower
from q2compile.tools.time_words import ratio_text, seconds_text, time_words

Data = Mapping[str, Any]


def beside_bf16(times: Iterable[Data]) -> dict[str, Any]:
    """The sum of times on one device: {"ratio": over BF16's, "text": the same with both ends,
    "words", "slower": as findings say so, "own": {"value", "text"}, "bf16": likewise}."""
    own, bf16 = own_and_bf16(times)
    ratio = own / bf16
    bars = {
        name: {"value": of.middle, "text": seconds_text(1e-6 * of)}
        for name, of in (("own", own), ("bf16", bf16))
    }
    words = {"text": ratio.text(), "words": time_words(ratio), "slower": is_slower(ratio)}
    return {"ratio": ratio.middle, **words, **bars}


def time_tiles(rows: Sequence[Data], devices: Sequence[Device]) -> dict[str, Any]:
    """{"predicted": {"text": times BF16's, over all devices, "devices": [`beside_bf16` and "name",
    ...]}, "measured": likewise}; null without a time. rows: each layer once."""
    taken = [row["predicted"] for row in rows if row["taken"]]
    predicted = {d.name: [of[d.column] for of in taken if d.column in of] for d in devices}
    measured: dict[str, list[Data]] = {}
    for row in rows:
        if row["measured"]:
            measured.setdefault(row["measured"]["device"], []).append(row["measured"])
    return {"predicted": _tile(predicted), "measured": _tile(measured)}


def _tile(times: Mapping[str, Sequence[Data]]) -> dict[str, Any] | None:
    known = {name: of for name, of in times.items() if of}
    if not known:
        return None
    ratios = [own / bf16 for own, bf16 in map(own_and_bf16, known.values())]
    ends = [end for ratio in ratios for end in (ratio.low, ratio.high)]
    shown = [{"name": name, **beside_bf16(of)} for name, of in known.items()]
    return {"text": ratio_text(Range(min(ends), max(ends))), "devices": shown}
