# SPDX-License-Identifier: Apache-2.0
"""Rounding to e2m1 by Blackwell's instructions: four elements by one piece of inline assembly, for
a sum or a maximum over their block.

The first of the four gets the result of all, and the others get one that adds nothing, which ptxas
sees, so that it drops their additions. That is right if the four are neighbors. Triton does not say
which elements come together, so each comes with its position modulo 4: if these are not 0 to 3,
each gets its own result. ptxas knows the positions, too, and keeps one of the two.

10.x multiplies two numbers by one instruction. For 12.x ptxas makes two of it.
"""

from __future__ import annotations

import sympy
import torch
from torch._inductor.virtualized import ops

from q2compile.lowering.inductor_kernels.fp32 import Value, bits_of, float_of, integer

FOUR = 4
_REGISTERS = (
    "{ .reg .pred all; .reg .b8 c0, c1, z0, z1, z2, z3; .reg .b16 h0, h1, h2, h3; "
    ".reg .b32 k, s, w0, w1, n0, n1, n2, n3; .reg .f32 v0, v1, v2, v3; "
    ".reg .b64 a0, a1, b0, b1; "
)


def _assembly(body: str, operands: int, others: str) -> str:
    """body: reads x at $4, and leaves the result of all four in w0, and those of each in n0 to n3.
    operands: their number, without the positions. others: what all but the first get."""
    first, *rest = (f"${FOUR * (1 + operands) + i}" for i in range(FOUR))
    differ = "".join(f"xor.b32 s, {at}, {i}; or.b32 k, k, s; " for i, at in enumerate(rest, 1))
    chosen = (f"selp.b32 ${i}, {others if i else 'w0'}, n{i}, all; " for i in range(FOUR))
    found = f"mov.b32 k, {first}; {differ}setp.eq.s32 all, k, 0; "
    return _REGISTERS + body + found + "".join(chosen) + "}"


_SCALED = (  # by the factor at $8, in v0 to v3; their codes in c0 and c1
    "mov.b64 a0, {$4, $5}; mov.b64 a1, {$6, $7}; mov.b64 b0, {$8, $9}; mov.b64 b1, {$10, $11}; "
    "mul.rn.f32x2 a0, a0, b0; mul.rn.f32x2 a1, a1, b1; mov.b64 {v0, v1}, a0; mov.b64 {v2, v3}, a1; "
    "cvt.rn.satfinite.e2m1x2.f32 c0, v1, v0; cvt.rn.satfinite.e2m1x2.f32 c1, v3, v2; "
)
# Four bytes at once, since the conversions themselves then put theirs into one word.
_CODES = "mov.b32 {z0, z1, z2, z3}, 0; mov.b32 w0, {c0, c1, z2, z3}; " + "".join(
    f"bfe.u32 n{i}, w0, {4 * i}, 4; shl.b32 s, ${12 + i}, 2; shl.b32 n{i}, n{i}, s; "
    for i in range(FOUR)
)
# Added to 512, a square is rounded to a multiple of 2^-14, the last bit of such an fp32. It is
# never in the middle of two, an odd multiple of 2^-15, so each of a sum is rounded as it is alone.
_ERRORS = (
    "cvt.rn.f16x2.e2m1x2 w0, c0; cvt.rn.f16x2.e2m1x2 w1, c1; "
    "mov.b32 {h0, h1}, w0; mov.b32 {h2, h3}, w1; "
    + "".join(f"sub.f32.f16 v{i}, h{i}, v{i}; " for i in range(FOUR))
    + "mov.b64 a0, {v0, v1}; mov.b64 a1, {v2, v3}; mov.b64 b0, 0x4400000044000000; "
    "fma.rn.f32x2 b1, a1, a1, b0; fma.rn.f32x2 b0, a0, a0, b0; "
    "mov.b64 {n0, n1}, b0; mov.b64 {n2, n3}, b1; fma.rn.f32x2 b0, a1, a1, b0; "
    + "".join(f"sub.s32 n{i}, n{i}, 0x44000000; " for i in range(FOUR))
    + "mov.b64 {w0, w1}, b0; add.s32 w0, w0, w1; sub.s32 w0, w0, 0x88000000; "
)
_LARGEST = "".join(f"abs.f32 v{i}, ${FOUR + i}; mov.b32 n{i}, v{i}; " for i in range(FOUR)) + (
    "max.NaN.f32 v0, v0, v1; max.NaN.f32 v2, v2, v3; max.NaN.f32 v0, v0, v2; mov.b32 w0, v0; "
)


def codes(x: Value, reciprocal: Value, column: sympy.Expr) -> Value:
    """Codes of x * reciprocal, at 4 * (column % 4) bits: to be summed. Of NaN, anything."""
    return _by(_assembly(_SCALED + _CODES, 2, "0"), column, x, reciprocal)


def errors(x: Value, reciprocal: Value, column: sympy.Expr) -> Value:
    """Squares of the errors of those codes, in units of 2^-14: to be summed."""
    return _by(_assembly(_SCALED + _ERRORS, 2, "0"), column, x, reciprocal)


def largest(x: Value, column: sympy.Expr) -> Value:
    """Bits of |x|, of which the largest is wanted; those of a NaN if there is one."""
    return _by(_assembly(_LARGEST, 1, "w0"), column, x)


def _by(assembly: str, column: sympy.Expr, *operands: Value) -> Value:
    """int32. Packed operands must have one shape, which `bits & 0` of the others gives each."""
    at = ops.bitwise_and(ops.index_expr(column, torch.int32), integer(FOUR - 1))
    zero = ops.bitwise_and(at, integer(0))
    for operand in operands:
        zero = ops.bitwise_or(zero, ops.bitwise_and(bits_of(operand), integer(0)))
    wide = [float_of(ops.bitwise_or(bits_of(operand), zero)) for operand in operands]
    kinds = ["=r"] * FOUR + ["f"] * (FOUR * len(wide)) + ["r"] * FOUR
    return ops.inline_asm_elementwise(
        *wide,
        ops.bitwise_or(at, zero),
        asm=assembly,
        constraints=",".join(kinds),
        dtype=torch.int32,
        is_pure=True,
        pack=FOUR,
    )
