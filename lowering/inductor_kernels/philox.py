# SPDX-License-Identifier: Apache-2.0
"""Philox in Inductor's IR: the words of `q2compile.runtime_kernels.numerics.philox` from the same
counters."""

from __future__ import annotations

import torch
from torch._inductor.virtualized import ops

from q2compile.lowering.inductor_kernels.fp32 import Value
from q2compile.runtime_kernels.numerics.philox import MULTIPLIERS, ROUNDS, WEYL

_LOW = 0xFFFFFFFF


def _int64(value: int) -> Value:
    return ops.constant(value, torch.int64)


def _low(value: Value) -> Value:
    return ops.bitwise_and(value, _int64(_LOW))


def _high(value: Value) -> Value:
    return ops.bitwise_right_shift(value, _int64(32))


def philox4x32(seed: Value, index: Value, rng_offset: int, purpose: int) -> list[Value]:
    """Block `index` under an rng_offset: four words in [0, 2^32). All values are int64."""
    c0, c1, c2, c3 = _low(index), _high(index), _int64(rng_offset), _int64(purpose)
    k0, k1 = _low(seed), _low(_high(seed))
    for _ in range(ROUNDS[purpose]):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1 = ops.bitwise_xor(ops.bitwise_xor(high1, c1), k0), low1
        c2, c3 = ops.bitwise_xor(ops.bitwise_xor(high0, c3), k1), low0
        k0, k1 = (_low(ops.add(k, _int64(w))) for k, w in zip((k0, k1), WEYL, strict=True))
    return [c0, c1, c2, c3]


def element_bits(seed: Value, index: Value, rng_offset: int, purpose: int) -> list[Value]:
    """Random bits of eight elements, from block `index`: `philox.element_bits`, as int32."""
    bits = []
    for word in philox4x32(seed, index, rng_offset, purpose):
        second = ops.add(
            ops.mul(ops.bitwise_and(word, _int64(0xFFFF)), _int64(64)),
            ops.bitwise_right_shift(word, _int64(26)),
        )
        bits += [ops.bitwise_right_shift(word, _int64(10)), second]
    return [ops.to_dtype(b, torch.int32) for b in bits]


def _product(word: Value, multiplier: int) -> tuple[Value, Value]:
    """The high and the low word of a product of two words.

    Computed with the multiplier minus 2^32. Its product with a word is above -2^62, so it never
    overflows (undefined in C++)."""
    product = ops.mul(word, _int64(multiplier - 2**32))
    return ops.add(_high(product), word), _low(product)
