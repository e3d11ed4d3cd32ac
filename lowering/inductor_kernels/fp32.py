# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the rounding rules in Inductor's `ops`, for one element or one block.

The same bits as `q2compile.runtime_kernels.numerics.formats`, written once for every Inductor
kernel, on a CPU (C++) and on CUDA (Triton). A value is an `ops` value: fp32 unless
said otherwise; `bits` is an fp32's pattern as int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import ops

from q2compile.runtime_kernels.cuda.jit.limits import family_of

Value = Any  # torch has no type for ops values that survives its virtualized handlers

_MAGNITUDE = 0x7FFFFFFF
_ABOVE_ONE = 0x3F800004  # 1 + 2^-21
TINY = torch.finfo(torch.float32).tiny
INFINITE = 0x7F800000  # magnitude bits from here on are Inf or NaN


def integer(value: int) -> Value:
    return ops.constant(value, torch.int32)


def number(value: float) -> Value:
    return ops.constant(value, torch.float32)


def bits_of(x: Value) -> Value:
    return ops.to_dtype_bitcast(x, torch.int32, torch.float32)


def float_of(bits: Value) -> Value:
    return ops.to_dtype_bitcast(bits, torch.float32, torch.int32)


def shifted_right(bits: Value, count: int) -> Value:
    return ops.bitwise_right_shift(bits, integer(count))


def shifted_left(bits: Value, count: int) -> Value:
    return ops.bitwise_left_shift(bits, integer(count))


def magnitude_bits(x: Value) -> Value:
    """Bits of |x|: ordered as the magnitudes, NaN above Inf above all finite values."""
    return ops.bitwise_and(bits_of(x), integer(_MAGNITUDE))


def converts_e2m1(device: torch.device) -> bool:
    """Whether a CUDA device is known to have an instruction that rounds fp32 to e2m1: Blackwell."""
    return family_of(torch.cuda.get_device_capability(device)) is not None


class Fp32:
    """Products, quotients and reciprocals with one rounding each.

    Triton contracts a product and a sum into one fma, and divides approximately. It does not change
    PTX instructions that name their rounding."""

    def __init__(self, device: torch.device) -> None:
        self.ptx = device.type == "cuda"
        self.converts_e2m1 = self.ptx and converts_e2m1(device)

    def mul(self, a: Value, b: Value) -> Value:
        return _ptx("mul.rn.f32 $0, $1, $2;", a, b) if self.ptx else ops.mul(a, b)

    def square_plus(self, a: Value, b: float) -> Value:
        """a * a + b with one rounding, for a * a < b, a power of two from 1 on."""
        if self.ptx:
            return _ptx("fma.rn.f32 $0, $1, $1, $2;", a, number(b))
        double = ops.to_dtype(a, torch.float64)
        last_bit = ops.constant(b * 2.0**29, torch.float64)  # weighs as much as that of an fp32 b
        rounded = ops.sub(ops.add(ops.mul(double, double), last_bit), last_bit)
        return ops.to_dtype(ops.add(rounded, ops.constant(b, torch.float64)), torch.float32)

    def div(self, a: Value, b: Value) -> Value:
        return _ptx("div.rn.f32 $0, $1, $2;", a, b) if self.ptx else ops.truediv(a, b)

    def reciprocal_of_4_bits(self, p: Value) -> Value:
        """1 / p of a normal p with 4 significant bits whose reciprocal is normal.

        One Newton step from the hardware's estimate: for each of the eight mantissas it ends at the
        nearest fp32 from every start within 2 units in the last place (the estimate is within 1),
        in 4 instructions where a division takes some 12 and a branch.
        """
        if not self.ptx:
            return ops.truediv(number(1.0), p)
        return _ptx(
            "{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; neg.f32 e, $1; "
            "fma.rn.f32 e, e, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }",
            p,
        )

    def e2m1_code(self, magnitude: Value, x: Value) -> Value:
        """The code, int32 in [0, 16), of a magnitude of the grid, with the sign of x.

        e2m1 is the top of an fp32 near its smallest normal. Times 2^-126, .5 falls on a subnormal
        and 1 on 2^-126, so that the code is the pattern without its last 22 bits.
        """
        return _with_sign(shifted_right(bits_of(ops.mul(magnitude, number(TINY))), 22), x)


def _ptx(asm: str, *args: Value) -> Value:
    constraints = ",".join(["=f"] + ["f"] * len(args))
    return ops.inline_asm_elementwise(
        *args, asm=asm, constraints=constraints, dtype=torch.float32, is_pure=True, pack=1
    )


def is_finite(magnitude_bits: Value) -> Value:
    """Whether these are bits of a finite magnitude."""
    return ops.lt(magnitude_bits, integer(INFINITE))


def round_e2m1(v: Value) -> Value:
    """`formats.round_e2m1` of 0 <= v < 7, by the float adder.

    m = max(v, 1 + 2^-21) times 2^22 is a whole number of steps of the grid around v, and v less
    that has a last mantissa bit that weighs one step (e2m1.cuh has the proof). The
    products are exact: contracting them into fmas changes nothing.
    """
    m = float_of(ops.maximum(bits_of(v), integer(_ABOVE_ONE)))
    steps = ops.mul(m, number(2.0**22))
    return ops.add(ops.sub(v, steps), steps)


def _with_sign(code: Value, x: Value) -> Value:
    """A code with the sign of x."""
    return ops.bitwise_or(code, ops.bitwise_and(shifted_right(bits_of(x), 28), integer(8)))


def top_bits(x: Value) -> Value:
    """`formats.keep_4_bits` of x >= 0, as exponent and 3 mantissa bits: int32 in [0, 2048), in the
    order of the values, at most 7 for subnormals."""
    bits = bits_of(x)
    odd = ops.bitwise_and(shifted_right(bits, 20), integer(1))
    return shifted_right(ops.add(ops.add(bits, integer(0x7FFFF)), odd), 20)


def from_top_bits(top: Value) -> Value:
    """The fp32 that `top_bits` made."""
    return float_of(shifted_left(top, 20))


def e4m3_byte(x: Value) -> Value:
    """The nearest e4m3 of 0 <= x <= 448 as int32 in [0, 127), ties to even.

    As in `Fp32.e2m1_code`: times 2^-120, the smallest normal of e4m3 falls on that of fp32. Written
    with integers because Triton has no e4m3 below sm_89.
    """
    return top_bits(ops.mul(x, number(2.0**-120)))


def e4m3_value(byte: Value) -> Value:
    """The fp32 of an e4m3 byte, an int32 in [0, 127)."""
    return ops.mul(from_top_bits(byte), number(2.0**120))
