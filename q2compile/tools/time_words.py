# SPDX-License-Identifier: Apache-2.0
"""A ratio of times, in the words that the page and `q2compile bench` use."""

from __future__ import annotations


def time_words(ratio: float) -> str:
    """A time as a multiple of BF16's, in words."""
    if ratio < 0.995:
        return f"{ratio:.2f} times BF16's time (faster)"
    if ratio < 1.005:
        return "as long as BF16"
    return f"{ratio:.{1 if ratio >= 2 else 2}f} times BF16's time (slower)"
