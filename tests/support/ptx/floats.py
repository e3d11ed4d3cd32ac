# SPDX-License-Identifier: Apache-2.0
"""Floating-point arithmetic with one rounding, and the small formats, in numpy.

Written from the PTX ISA manual, and independent of runtime_kernels/numerics: a result is computed
exactly or to odd in float64, then rounded once. Subnormals are not flushed, as in every instruction
without .ftz.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)  # the canonical NaN of single precision


class Format(NamedTuple):
    """A float of `width` bits. lowest: the exponent of its smallest normal. infinite: has Inf.
    nan: what a conversion makes of NaN (e2m1 has none, and gets the largest)."""

    width: int
    mantissa: int
    lowest: int
    largest: float
    infinite: bool
    nan: int


E2M1 = Format(4, 1, 0, 6.0, False, 0x7)
E4M3 = Format(8, 3, -6, 448.0, False, 0x7F)
F16 = Format(16, 10, -14, 65504.0, True, 0x7FFF)
BF16 = Format(16, 7, -126, float(np.uint32(0x7F7F0000).view(np.float32)), True, 0x7FFF)


def encoded(x: np.ndarray, kind: Format, saturates: bool) -> np.ndarray:
    """Bits of x, float64, to the nearest, ties to even. saturates: .satfinite."""
    magnitude = np.abs(x)
    exponent = _exponent(magnitude, kind)
    magnitude = np.rint(np.ldexp(magnitude, kind.mantissa - exponent))  # in steps
    magnitude = np.ldexp(magnitude, exponent - kind.mantissa)
    over, nan = magnitude > kind.largest, np.isnan(x)
    magnitude = np.where(over | nan, kind.largest, magnitude)
    exponent = _exponent(magnitude, kind)
    steps = np.ldexp(magnitude, kind.mantissa - exponent).astype(np.int64)
    bits = ((exponent - kind.lowest).astype(np.int64) << kind.mantissa) + steps
    if not saturates:
        assert kind.infinite, "without .satfinite only for formats with an infinity"
        bits += over  # the bits of Inf follow those of the largest
    bits |= np.signbit(x).astype(np.int64) << (kind.width - 1)
    return np.where(nan, kind.nan, bits).astype(np.uint32)


def _exponent(magnitude: np.ndarray, kind: Format) -> np.ndarray:
    """The exponent of a magnitude. Its step is 2^(exponent - mantissa)."""
    exponent = np.frexp(magnitude)[1] - 1
    return np.where(magnitude == 0, kind.lowest, np.maximum(exponent, kind.lowest))


def _values(kind: Format) -> np.ndarray:
    bits = np.arange(1 << kind.width)
    magnitude = bits & ((1 << (kind.width - 1)) - 1)
    exponent, fraction = magnitude >> kind.mantissa, magnitude & ((1 << kind.mantissa) - 1)
    steps = np.where(exponent > 0, fraction + (1 << kind.mantissa), fraction)
    x = np.ldexp(
        steps.astype(np.float64), np.maximum(exponent, 1) - 1 + kind.lowest - kind.mantissa
    )
    x = np.where(bits >> (kind.width - 1) == 1, -x, x)
    if kind is E4M3:
        x[[0x7F, 0xFF]] = np.nan
    return x


VALUES = {E2M1: _values(E2M1), E4M3: _values(E4M3)}  # by code


def canonical(x: np.ndarray) -> np.ndarray:
    """float32 with every NaN the canonical one."""
    nan = x != x
    if nan.any():
        x[nan] = NAN32
    return x


def sum_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y, float64, cut toward zero, and where that is inexact with its last bit set: a later
    rounding to fewer bits gives what one rounding of the exact sum gives."""
    total = x + y
    part = total - x
    lost = (x - (total - part)) + (y - part)
    wrong = (np.abs(lost) > 0) & (total.view(np.int64) & 1 == 0)
    if wrong.any():
        further = np.signbit(lost[wrong]) == np.signbit(total[wrong])
        total.view(np.int64)[wrong] += np.where(further, 1, -1)
    return total


def to_f32(x: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """float64, exact or to odd, rounded to float32."""
    rounded = x.astype(np.float32)
    if toward_zero:
        rounded = np.where(
            np.abs(rounded) > np.abs(x), np.nextafter(rounded, np.float32(0)), rounded
        )
    return canonical(rounded)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """a * b + c in float32; the product is exact in float64."""
    return to_f32(sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)), toward_zero)


def f16_of(bits: np.ndarray) -> np.ndarray:
    """float64 of uint16."""
    return bits.view(np.float16).astype(np.float64)


def bf16_of(bits: np.ndarray) -> np.ndarray:
    """float64 of uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def off_by_an_ulp(exact: np.ndarray, of: np.ndarray) -> np.ndarray:
    """float32 next to the rounded exact value, which of three by a hash of the operand's bits: a
    kernel may not depend on how good an approximation is. Subnormals become 0 (.ftz)."""
    rounded = exact.astype(np.float32)
    bits = rounded.view(np.int32)
    normal = np.isfinite(rounded) & (np.abs(rounded) >= np.float32(2.0**-126))
    moved = bits + (of.view(np.uint32) * np.uint32(2654435761) % 3).astype(np.int32) - 1
    return canonical(np.where(normal, moved, bits).view(np.float32))


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 with subnormals as zeros of their signs."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def larger(a: np.ndarray, b: np.ndarray, nan: bool, least: bool = False) -> np.ndarray:
    """max or (least) min of floats of one type. +0 is above -0. A NaN is left out, unless both are,
    or with `nan` (max.NaN) is the result."""
    zero = np.signbit(a) if least else ~np.signbit(a)
    first = (a < b) if least else (a > b)
    first |= (a == b) & zero
    result = np.where(first, a, b)
    if nan:
        result = np.where(np.isnan(a) | np.isnan(b), np.nan, result).astype(a.dtype)
    else:
        result = np.where(np.isnan(b), a, result)
    return result
