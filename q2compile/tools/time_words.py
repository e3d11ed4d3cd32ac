# SPDX-License-Identifier: Apache-2.0
"""Times in the words that the page and `q2compile bench` use."""

from __future__ import annotations

from q2compile.cost_model.ranges import Range


def time_words(ratio: float | Range) -> str:
    """A time as a multiple of BF16's, in words."""
    if not isinstance(ratio, Range):
        ratio = Range.exactly(ratio)
    ends = [-1 if end < 0.995 else int(end >= 1.005) for end in (ratio.low, ratio.high)]
    if ends == [0, 0]:
        return "as long as BF16"
    how = {-2: " (faster)", 2: " (slower)"}.get(sum(ends), "")
    return f"{ratio_text(ratio)} times BF16's time{how}"


def ratio_text(ratio: Range) -> str:
    return ratio.text(".1f" if ratio.low >= 2 else ".2f")


def seconds_text(seconds: Range) -> str:
    """Both ends in the unit that fits each, such as "980 µs-1.2 ms"; one where they are alike."""
    ends = map(_seconds, sorted((seconds.low, seconds.high)))
    return "-".join(dict.fromkeys(ends))


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
