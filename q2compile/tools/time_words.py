# SPDX-License-Identifier: Apache-2.0
"""A ratio of times, in the words that the page and `q2compile bench` use."""

from __future__ import annotations

from q2compile.cost_model.ranges import Range


def time_words(ratio: float | Range) -> str:
    """A time as a multiple of BF16's, in words."""
    if not isinstance(ratio, Range):
        ratio = Range(ratio, ratio)
    ends = [-1 if end < 0.995 else int(end >= 1.005) for end in (ratio.low, ratio.high)]
    if ends == [0, 0]:
        return "as long as BF16"
    how = {-2: " (faster)", 2: " (slower)"}.get(sum(ends), "")
    return f"{ratio.text('.1f' if ratio.low >= 2 else '.2f')} times BF16's time{how}"
