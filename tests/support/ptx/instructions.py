# SPDX-License-Identifier: Apache-2.0
"""PTX instructions that work on one lane at a time, by the PTX ISA manual 9.0.

TABLE has each instruction under its full name. A kernel with any other instruction raises an error
that names it. Each function that fills TABLE names the sections of the manual's chapter
"Instruction Set" that it is written from.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np

from tests.support.ptx import floats
from tests.support.ptx.floats import BF16, E2M1, E4M3, F16, VALUES, encoded

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
TYPES = {
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.uint16),
    "pred": np.dtype(bool),
    "f32x2": np.dtype(U64),
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2"), np.dtype(U32)),
}
SIGNED, UNSIGNED = ("s16", "s32", "s64"), ("u16", "u32", "u64")
BITS, INTEGERS = ("b16", "b32", "b64"), (*SIGNED, *UNSIGNED)
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


class Elementwise(NamedTuple):
    """compute: from arrays of the sources' types, one element a lane, to one of the result's."""

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., np.ndarray]


TABLE: dict[str, Elementwise] = {}


def _define(name: str, result: str, sources: tuple[str, ...], compute: Callable) -> None:
    TABLE[name] = Elementwise(result, sources, compute)


# Integers and bits ---------------------------------------------------------------------------


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cut toward zero; of a zero all bits are set (the manual leaves it to the machine)."""
    quotient = a // np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "i":
        quotient += ((a < 0) != (b < 0)) & (quotient * b != a)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of a product of up to 32 bits."""
    bits, wide = 8 * a.dtype.itemsize, np.int64 if a.dtype.kind == "i" else U64
    return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)


def _shifted_left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def _shifted_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Amounts beyond the width shift everything out: the sign, or zeros, remain."""
    bits = 8 * a.dtype.itemsize
    result = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return result if a.dtype.kind == "i" else np.where(by < bits, result, 0).astype(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: byte i of the result is that of {b, a} which nibble i says, or its sign eight times."""
    both = a.astype(U64) | b.astype(U64) << U64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> U32(4 * i) & U32(15)
        byte = (both >> ((nibble & U32(7)) * U32(8)).astype(U64)).astype(U32) & U32(255)
        sign = np.where(byte >> U32(7) == 1, U32(255), U32(0))
        result |= np.where(nibble >> U32(3) == 1, sign, byte) << U32(8 * i)
    return result


def _inserted(a: np.ndarray, b: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bfi: the lowest bits of a, as many as `count`, in place of those of b from `first` on."""
    first, count = (x.astype(U64) & U64(255) for x in (first, count))
    ones = (U64(1) << np.minimum(count, U64(32))) - U64(1)
    mask, moved = ones << np.minimum(first, U64(32)), (a & ones) << np.minimum(first, U64(32))
    return (moved & mask | b & ~mask).astype(U32)


def _extracted(a: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bfe: as many bits as `count` from `first` on, extended by the highest of them where signed;
    beyond the word there are copies of its sign, or zeros."""
    signed = a.dtype.kind == "i"
    first, count = (np.minimum(x & U32(255), U32(64)).astype(np.int64) for x in (first, count))
    field = np.right_shift(a.astype(np.int64), np.minimum(first, 63))
    kept = np.minimum(count, 32)
    ones = (np.int64(1) << kept) - 1
    result = field & ones
    highest = result >> np.maximum(kept - 1, 0) & 1
    if signed:
        result = np.where((kept > 0) & (highest == 1), result | ~ones, result)
    return result.astype(a.dtype)


def _halves(compute: Callable) -> Callable:
    """An operation on two halves of 16 bits each, as uint16 arrays."""
    return lambda *words: compute(*(w.view(U16) for w in words)).astype(U16).view(U32)


def _integers() -> None:
    """Integer Arithmetic Instructions (add to popc, bfi); Logic and Shift Instructions; of Data
    Movement and Conversion Instructions: prmt, cvta, cvt between integers; of Comparison and
    Selection Instructions: selp."""
    for t in INTEGERS:
        _define(f"add.{t}", t, (t, t), np.add)
        _define(f"sub.{t}", t, (t, t), np.subtract)
        _define(f"mul.lo.{t}", t, (t, t), np.multiply)
        _define(f"mad.lo.{t}", t, (t, t, t), lambda a, b, c: a * b + c)
        _define(f"div.{t}", t, (t, t), _divided)
        _define(f"rem.{t}", t, (t, t), lambda a, b: a - _divided(a, b) * b)
        _define(f"max.{t}", t, (t, t), np.maximum)
        _define(f"min.{t}", t, (t, t), np.minimum)
        _define(f"shr.{t}", t, (t, "u32"), _shifted_right)
    for t, wide in _WIDER.items():
        dtype = TYPES[wide]
        _define(f"mul.hi.{t}", t, (t, t), _high)
        _define(f"mul.wide.{t}", wide, (t, t), lambda a, b, d=dtype: a.astype(d) * b.astype(d))
        _define(
            f"mad.wide.{t}",
            wide,
            (t, t, wide),
            lambda a, b, c, d=dtype: a.astype(d) * b.astype(d) + c,
        )
    for t in SIGNED:
        _define(f"neg.{t}", t, (t,), np.negative)
        _define(f"abs.{t}", t, (t,), np.abs)
    for t in (*BITS, "pred"):
        _define(f"and.{t}", t, (t, t), np.bitwise_and)
        _define(f"or.{t}", t, (t, t), np.bitwise_or)
        _define(f"xor.{t}", t, (t, t), np.bitwise_xor)
        _define(f"not.{t}", t, (t,), np.invert)
    for t in BITS:
        _define(f"shl.{t}", t, (t, "u32"), _shifted_left)
        _define(f"shr.{t}", t, (t, "u32"), _shifted_right)
    _define("popc.b32", "u32", ("b32",), lambda a: np.bitwise_count(a).astype(U32))
    _define("prmt.b32", "b32", ("b32", "b32", "b32"), _permuted)
    _define("bfi.b32", "b32", ("b32", "b32", "u32", "u32"), _inserted)
    for t in ("u32", "s32"):
        _define(f"bfe.{t}", t, (t, "u32", "u32"), _extracted)
    _define("max.u16x2", "u16x2", ("u16x2", "u16x2"), _halves(np.maximum))
    _define("cvta.to.global.u64", "u64", ("u64",), lambda a: a)  # generic addresses are the same
    for t in (*BITS, *UNSIGNED, *SIGNED, "f32"):
        _define(f"selp.{t}", t, (t, t, "pred"), lambda a, b, p: np.where(p, a, b))
    for to, of in product((*INTEGERS, "s8", "u8"), repeat=2):
        if to != of:
            _define(f"cvt.{to}.{of}", to, (of,), lambda a, d=TYPES[to]: a.astype(d))


# Comparisons ---------------------------------------------------------------------------------

_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _either_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def _comparisons() -> None:
    """Comparison and Selection Instructions: setp. Comparisons of floats are false where an operand
    is NaN; those that end in u are true there."""
    for name, compare in _COMPARISONS.items():
        for t in INTEGERS:
            _define(f"setp.{name}.{t}", "pred", (t, t), compare)
        ordered = lambda a, b, c=compare: c(a, b) & ~_either_nan(a, b)  # noqa: E731
        _define(f"setp.{name}.f32", "pred", ("f32", "f32"), ordered)
        unordered = lambda a, b, c=compare: c(a, b) | _either_nan(a, b)  # noqa: E731
        _define(f"setp.{name}u.f32", "pred", ("f32", "f32"), unordered)
    for t in BITS:
        _define(f"setp.eq.{t}", "pred", (t, t), np.equal)
        _define(f"setp.ne.{t}", "pred", (t, t), np.not_equal)
    _define("setp.nan.f32", "pred", ("f32", "f32"), _either_nan)
    _define("setp.num.f32", "pred", ("f32", "f32"), lambda a, b: ~_either_nan(a, b))


# Single precision ----------------------------------------------------------------------------


def _singles() -> None:
    """Floating-Point Instructions. Without .ftz they keep subnormals; a NaN that they make is
    0x7fffffff. The packed forms (.f32x2) compute two of the same."""
    one_rounding = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name, compute in one_rounding.items():
        rounded = lambda a, b, c=compute: floats.canonical(c(a, b))  # noqa: E731
        _single(f"{name}.rn", 2, rounded)
    # Without a modifier to nearest even, where ptxas may also contract a product and a sum.
    for name, t in product(one_rounding, ("f32", "f32x2")):
        TABLE[f"{name}.{t}"] = TABLE[f"{name}.rn.{t}"]
    cut = lambda a, b: floats.fma32(a, np.ones_like(a), b, toward_zero=True)  # noqa: E731
    _define("add.rz.f32", "f32", ("f32", "f32"), cut)
    _single("fma.rn", 3, floats.fma32)
    _single("fma.rz", 3, lambda a, b, c: floats.fma32(a, b, c, toward_zero=True))
    _define("div.rn.f32", "f32", ("f32", "f32"), lambda a, b: floats.canonical(a / b))
    _define("rcp.rn.f32", "f32", ("f32",), lambda a: floats.canonical(np.float32(1) / a))
    _define("rcp.approx.ftz.f32", "f32", ("f32",), _reciprocal)
    _define("ex2.approx.ftz.f32", "f32", ("f32",), _power)
    _define("div.full.f32", "f32", ("f32", "f32"), _quotient)
    sign = U32(1 << 31)
    _define("neg.f32", "b32", ("b32",), lambda a: a ^ sign)
    _define("abs.f32", "b32", ("b32",), lambda a: a & ~sign)
    # The sign of the first, and the rest of the second.
    _define("copysign.f32", "b32", ("b32", "b32"), lambda a, b: (a & sign) | (b & ~sign))
    for name, least in (("max", False), ("min", True)):
        for ending, nan in (("", False), (".NaN", True)):
            chosen = lambda a, b, n=nan, k=least: floats.canonical(  # noqa: E731
                floats.larger(a, b, n, k)
            )
            _define(f"{name}{ending}.f32", "f32", ("f32", "f32"), chosen)
    _define("min.xorsign.abs.f32", "f32", ("f32", "f32"), _smaller_magnitude)


def _single(name: str, count: int, compute: Callable) -> None:
    """An instruction of f32, and its twin of two at once."""
    _define(f"{name}.f32", "f32", ("f32",) * count, compute)
    pairs = lambda *two: compute(*(t.view(np.float32) for t in two)).view(U64)  # noqa: E731
    _define(f"{name}.f32x2", "f32x2", ("f32x2",) * count, pairs)


def _smaller_magnitude(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """With the exclusive or of both signs, those of zeros and NaN too."""
    magnitude = floats.larger(np.abs(a), np.abs(b), False, True)
    negative = np.signbit(a) ^ np.signbit(b)
    return floats.canonical(np.where(negative, -magnitude, magnitude))


def _reciprocal(x: np.ndarray) -> np.ndarray:
    """To one ulp; subnormals, in and out, are zeros."""
    exact = 1.0 / floats.flushed(x).astype(np.float64)
    return floats.flushed(floats.off_by_an_ulp(exact, x))


def _power(x: np.ndarray) -> np.ndarray:
    """2^x to one ulp of the two that the manual allows."""
    exact = np.exp2(floats.flushed(x).astype(np.float64))
    return floats.flushed(floats.off_by_an_ulp(exact, x))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """To one ulp of the two that the manual allows; 0 for a divisor beyond 2^126."""
    exact = a.astype(np.float64) / b
    beyond = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(beyond, np.copysign(np.float32(0), exact), floats.off_by_an_ulp(exact, b))


# Conversions, and halves of words ------------------------------------------------------------


def _pair_of(kind: floats.Format, saturates: bool) -> Callable:
    """The first operand becomes the upper part."""

    def compute(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        upper, lower = (encoded(x.astype(np.float64), kind, saturates) for x in (upper, lower))
        return upper << U32(kind.width) | lower

    return compute


def _from_small(kind: floats.Format) -> Callable:
    """Two of a small format as two f16, which hold them exactly."""

    def compute(codes: np.ndarray) -> np.ndarray:
        codes = codes.astype(U32)
        lower = VALUES[kind][codes & U32((1 << kind.width) - 1)]
        upper = VALUES[kind][codes >> U32(kind.width)]
        lower, upper = (encoded(x, F16, False) for x in (lower, upper))
        return upper << U32(16) | lower

    return compute


def _half_arithmetic(name: str, kind: floats.Format, value: Callable) -> None:
    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return encoded(floats.sum_to_odd(value(a) * value(b), value(c)), kind, False)

    def mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return encoded(value(a) * value(b), kind, False)

    _define(f"fma.rn.{name}", name, (name,) * 3, _halves(fma))
    _define(f"mul.rn.{name}", name, (name,) * 2, _halves(mul))


def _conversions() -> None:
    """Data Movement and Conversion Instructions: cvt; Half Precision and Mixed Precision Floating
    Point Instructions. .satfinite makes the largest finite number of what is beyond it; of NaN it
    makes the format's NaN, and for e2m1, which has none, the largest positive number. A conversion
    of a float to an integer of 32 bits ends at the integer's limits, and makes 0 of NaN."""
    f32 = ("f32", "f32")
    _define(
        "cvt.rn.satfinite.e2m1x2.f32", "b8", f32, lambda *x: _pair_of(E2M1, True)(*x).astype(U8)
    )
    _define(
        "cvt.rn.satfinite.e4m3x2.f32", "b16", f32, lambda *x: _pair_of(E4M3, True)(*x).astype(U16)
    )
    _define("cvt.rn.f16x2.f32", "b32", f32, _pair_of(F16, False))
    _define("cvt.rn.bf16x2.f32", "b32", f32, _pair_of(BF16, False))
    _define("cvt.rn.f16x2.e2m1x2", "b32", ("b8",), _from_small(E2M1))
    _define("cvt.rn.f16x2.e4m3x2", "b32", ("b16",), _from_small(E4M3))
    _define("cvt.f32.f16", "f32", ("b16",), lambda a: floats.to_f32(floats.f16_of(a)))
    _define("cvt.f32.bf16", "f32", ("b16",), lambda a: floats.to_f32(floats.bf16_of(a)))
    _define("cvt.rn.f32.f64", "f32", ("f64",), floats.to_f32)
    _define("cvt.rmi.ftz.f32.f32", "f32", ("f32",), lambda a: np.floor(floats.flushed(a)))
    # Conversions between 16-bit floats and fp32.
    for t, of in (("f16", floats.f16_of), ("bf16", floats.bf16_of)):
        single = lambda a, of=of: floats.to_f32(of(a))  # noqa: E731
        _define(
            f"fma.rn.f32.{t}",
            "f32",
            ("b16", "b16", "f32"),
            lambda a, b, c, f=single: floats.fma32(f(a), f(b), c),
        )
        _define(
            f"sub.f32.{t}",
            "f32",
            ("b16", "f32"),
            lambda a, c, f=single: floats.canonical(f(a) - c),
        )
        _define(
            f"add.rn.f32.{t}",
            "f32",
            ("b16", "f32"),
            lambda a, c, f=single: floats.canonical(f(a) + c),
        )
    for t in ("u32", "s32"):
        # Out of range: the nearest that is in it; NaN: 0.
        low, high = np.iinfo(TYPES[t]).min, np.iinfo(TYPES[t]).max
        _define(
            f"cvt.rzi.{t}.f32",
            t,
            ("f32",),
            lambda a, d=TYPES[t], low=low, high=high: np.clip(
                np.trunc(np.nan_to_num(a.astype(np.float64))), low, high
            ).astype(d),
        )
        _define(f"cvt.rn.f32.{t}", "f32", (t,), lambda a: a.astype(np.float64).astype(np.float32))
    _half_arithmetic("f16x2", F16, floats.f16_of)
    _half_arithmetic("bf16x2", BF16, floats.bf16_of)
    for name, least in (("max", False), ("min", True)):

        def chosen(a: np.ndarray, b: np.ndarray, least: bool = least) -> np.ndarray:
            return encoded(
                floats.larger(floats.f16_of(a), floats.f16_of(b), False, least), F16, False
            )

        _define(f"{name}.f16x2", "f16x2", ("f16x2", "f16x2"), _halves(chosen))


_integers()
_comparisons()
_singles()
_conversions()
