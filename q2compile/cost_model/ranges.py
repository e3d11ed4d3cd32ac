# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not exactly known: a constant of the cost model, and a prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Keys of a report's predictions.
ENDS = ("microseconds_low", "microseconds_high", "bf16_microseconds_low", "bf16_microseconds_high")


@dataclass(frozen=True)
class Range:
    """A number at both ends of what is known. A constant is between its ends. A time is at its low
    end where every constant favors quantization, and at its high end where none does: as BF16's
    rate is among them, BF16's time is longer at the low end."""

    low: float
    high: float

    @classmethod
    def exactly(cls, number: float) -> Range:
        return cls(number, number)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def reversed(self) -> Range:
        return Range(self.high, self.low)

    def __add__(self, other: Range | float) -> Range:
        other = _range(other)
        return Range(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Range | float) -> Range:
        return self + -1.0 * _range(other)

    def __mul__(self, other: Range | float) -> Range:
        other = _range(other)
        return Range(self.low * other.low, self.high * other.high)

    __rmul__ = __mul__

    def __truediv__(self, other: Range | float) -> Range:
        other = _range(other)
        return Range(self.low / other.low, self.high / other.high)

    def __rtruediv__(self, work: float) -> Range:
        """The time of work at this rate."""
        return Range(work / self.high, work / self.low)

    def text(self, form: str = ".2f") -> str:
        """Both ends, the smaller one first; one number where they are written alike."""
        ends = (f"{end:{form}}" for end in sorted((self.low, self.high)))
        return "-".join(dict.fromkeys(ends))


def longest(*times: Range | float) -> Range:
    """The longest at each end."""
    ranges = [_range(time) for time in times]
    return Range(max(one.low for one in ranges), max(one.high for one in ranges))


def total(times: Iterable[Range]) -> Range:
    return sum(times, Range(0.0, 0.0))


def own_and_bf16(times: Iterable[Mapping[str, float]]) -> tuple[Range, Range]:
    """The time of rows of a report and BF16's, by their predictions for one device, or as measured
    there. What was measured, and a report of an earlier version, has no ends."""

    def sum_of(key: str) -> Range:
        return Range(*(sum(of.get(key + end, of[key]) for of in rows) for end in ("_low", "_high")))

    rows = list(times)
    return sum_of("microseconds"), sum_of("bf16_microseconds")


def over_bf16(times: Iterable[Mapping[str, float]]) -> Range:
    """The time of rows of a report divided by BF16's (`own_and_bf16`)."""
    own, bf16 = own_and_bf16(times)
    return own / bf16


def _range(number: Range | float) -> Range:
    return number if isinstance(number, Range) else Range.exactly(number)
